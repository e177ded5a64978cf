// Tiles whose activations are float, or bfloat16 where there is an instruction for pairs of them.
//
// Codes are numbers here: code - 8 or code - 128, which bfloat16 and float hold exactly. Scale, and
// what a zero differs from 8, follow once a group.
#include "tiles.h"

namespace qt {
namespace {

// Weight k + J (J < 8) of WIDTH columns, without scale; `steps` is at k.
template <int BITS, int J>
QT_INLINE vf weight(const uint8_t* steps, int vector) {
  const uint8_t* p = steps + vector * VECTOR_BYTES;
  if (BITS == 4) {
    const vu word = load_vector<vu>(p) >> (J % 4 * 8 + J / 4 * 4);
#if defined(QT_AVX512)
    const vf numbers = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    return _mm512_permutexvar_ps((__m512i)word, numbers);
#else
    return to_float((vi)(word & 15u) - 8);
#endif
  }
  if (BITS == 8) {
    const vu word = load_vector<vu>(p + J / 4 * STEP_BYTES);
    return to_float((vi)(word >> (J % 4 * 8) & 255u) - 128);
  }
  if (BITS == 16) {
    // Of four neighbours, one step has 0 and 2, the next 1 and 3.
    const vu word = load_vector<vu>(p + (J / 4 * 2 + J % 2) * STEP_BYTES);
    return (vf)(J % 4 < 2 ? word << 16 : word & 0xffff0000u);
  }
  return load_vector<vf>(p + J * STEP_BYTES);
}

// How 8 neighbours in k are multiplied: in PRODUCTS pieces, each a vector of weights and an item of x.
struct FloatDot {
  static constexpr int PRODUCTS = 8;
  typedef float Item;

  template <int BITS, int J>
  static QT_INLINE vf weights(const uint8_t* steps, int vector) {
    return weight<BITS, J>(steps, vector);
  }
  static QT_INLINE void add(vf& sum, vf weights, const float* x) { add_product(sum, weights, x); }
};

#if defined(QT_BF16_DOT)

struct Bf16Dot {
  static constexpr int PRODUCTS = 4;
  typedef int32_t Item;  // a pair of bfloat16

  // Pair 0 is k and k + 2, 1 is k + 1 and k + 3, 2 and 3 the same at k + 4.
  template <int BITS, int PAIR>
  static QT_INLINE vi weights(const uint8_t* steps, int vector) {
    const uint8_t* p = steps + vector * VECTOR_BYTES;
    if (BITS == 4) {
      // -8 to 7 as bfloat16, twice: the fifth bit of an index belongs to another code.
      typedef uint16_t words __attribute__((vector_size(64)));
      const words numbers = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                             0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                             0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                             0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
      const __m512i word = _mm512_srli_epi16(load_vector<__m512i>(p), PAIR % 2 * 8 + PAIR / 2 * 4);
      return (vi)_mm512_permutexvar_epi16(word, (__m512i)numbers);
    }
    if (BITS == 8) {
      const vf even = weight<8, PAIR / 2 * 4 + PAIR % 2>(steps, vector);
      const vf odd = weight<8, PAIR / 2 * 4 + PAIR % 2 + 2>(steps, vector);
      return (vi)((vu)even >> 16 | (vu)odd);
    }
    return load_vector<vi>(p + PAIR * STEP_BYTES);
  }
  static QT_INLINE void add(vf& sum, vi weights, const int32_t* x) {
#if QT_ASSEMBLY
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*x));
#else
    sum = _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(*x));
#endif
  }
};

#endif

template <class Dot, int BITS, int ROWS, size_t J>
QT_INLINE void add_products(vf (&sums)[ROWS][tile_vectors(ROWS)], const uint8_t* steps, int first,
                            const typename Dot::Item* x) {
  constexpr int VECTORS = tile_vectors(ROWS);
  decltype(Dot::template weights<BITS, J>(steps, first)) weights[VECTORS];
  QT_UNROLL
  for (int v = 0; v < VECTORS; v++) {
    weights[v] = Dot::template weights<BITS, J>(steps, first + v);
    pin(weights[v]);
  }
  QT_UNROLL
  for (int r = 0; r < ROWS; r++)
    QT_UNROLL
    for (int v = 0; v < VECTORS; v++) Dot::add(sums[r][v], weights[v], x + J * ROWS + r);
}

template <class Dot, int BITS, int ROWS, size_t... J>
QT_INLINE void add_8(vf (&sums)[ROWS][tile_vectors(ROWS)], const uint8_t* steps, int first,
                     const typename Dot::Item* x, std::index_sequence<J...>) {
  (add_products<Dot, BITS, ROWS, J>(sums, steps, first, x), ...);
}

// Adds a group's sums to the results.
template <int BITS, int ROWS>
QT_INLINE void add_group(const TileWeights& w, int group, int first,
                         const vf (&sums)[ROWS][tile_vectors(ROWS)], const float* x_sums,
                         float* out) {
  constexpr int VECTORS = tile_vectors(ROWS);
  QT_UNROLL
  for (int v = 0; v < VECTORS; v++) {
    const int column = (first + v) * WIDTH, at = group * BLOCK_COLUMNS + column;
    const vf scale = BITS < 16 ? load_vector<vf>(w.scales + at) : spread(1.f);
    const vf offset = BITS == 4 ? to_float(8 - load_vector<vi>(w.zeros + at)) : vf{};
    QT_UNROLL
    for (int r = 0; r < ROWS; r++) {
      float* to = out + r * BLOCK_COLUMNS + column;
      vf sum = sums[r][v];
      if (BITS == 4) sum = multiply_add(offset, spread(x_sums[r]), sum);
      store_vector(to, multiply_add(sum, scale, load_vector<vf>(to)));
    }
  }
}

template <class Dot, int BITS, int ROWS>
QT_NOINLINE void exact_tile(const TileWeights& w, const TileActs& x, float* out) {
  constexpr int VECTORS = tile_vectors(ROWS);
  constexpr auto PIECES = std::make_index_sequence<Dot::PRODUCTS>();
  for (int first = 0; first < BLOCK_COLUMNS / WIDTH; first += VECTORS) {
    const uint8_t* steps = w.steps;
    const auto* values = reinterpret_cast<const typename Dot::Item*>(x.values);
    const float* x_sums = static_cast<const float*>(x.sums);
    for (int g = 0; g < w.groups; g++, x_sums += ROWS) {
      keep_in_memory();
      vf sums[ROWS][VECTORS];
      QT_UNROLL
      for (int r = 0; r < ROWS; r++)
        QT_UNROLL
        for (int v = 0; v < VECTORS; v++) sums[r][v] = vf{};
#pragma GCC unroll 1
      for (int k = 0; k < w.group; k += 8) {
        add_8<Dot, BITS, ROWS>(sums, steps, first, values, PIECES);
        steps += steps_of_8(BITS), values += Dot::PRODUCTS * ROWS;
      }
      add_group<BITS, ROWS>(w, g, first, sums, x_sums, out);
    }
  }
}

template <class Dot, int BITS, size_t... ROW>
constexpr TileTable table(std::index_sequence<ROW...>) {
  return {{nullptr, exact_tile<Dot, BITS, int(ROW) + 1>...}};
}

constexpr auto ROWS = std::make_index_sequence<TILE_ROWS>();

}  // namespace

const TileTable& float_tiles(int bits) {
  static constexpr TileTable FOUR = table<FloatDot, 4>(ROWS), EIGHT = table<FloatDot, 8>(ROWS);
  static constexpr TileTable WORD = table<FloatDot, 16>(ROWS), FLOAT = table<FloatDot, 32>(ROWS);
  return bits == 4 ? FOUR : bits == 8 ? EIGHT : bits == 16 ? WORD : FLOAT;
}

#if defined(QT_BF16_DOT)

const TileTable& bf16_tiles(int bits) {
  static constexpr TileTable FOUR = table<Bf16Dot, 4>(ROWS), EIGHT = table<Bf16Dot, 8>(ROWS);
  static constexpr TileTable WORD = table<Bf16Dot, 16>(ROWS);
  return bits == 4 ? FOUR : bits == 8 ? EIGHT : WORD;
}

#endif

}  // namespace qt
