// Tiles whose activations are bfloat16, where there is an instruction for pairs of them; elsewhere
// they are computed as floats.
#include "weights.h"

#if defined(QT_BF16_DOT)

namespace qt {
namespace {

// Pairs of bfloat16 weights: PAIR 0 is k and k + 2, 1 is k + 1 and k + 3, 2 and 3 the same at k + 4.
template <int BITS, int PAIR>
QT_INLINE vi weight_pair(const uint8_t* steps, int vector) {
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

QT_INLINE void add_pair(vf& sum, vi weights, const int32_t* x) {
#if QT_ASSEMBLY
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*x));
#else
  sum = _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(*x));
#endif
}

template <int BITS, int ROWS, int PAIR>
QT_INLINE void add_pairs(vf (&sums)[ROWS][tile_vectors(ROWS)], const uint8_t* steps, int first,
                         const int32_t* x) {
  constexpr int VECTORS = tile_vectors(ROWS);
  vi weights[VECTORS];
  QT_UNROLL
  for (int v = 0; v < VECTORS; v++) {
    weights[v] = weight_pair<BITS, PAIR>(steps, first + v);
    pin(weights[v]);
  }
  QT_UNROLL
  for (int r = 0; r < ROWS; r++)
    QT_UNROLL
    for (int v = 0; v < VECTORS; v++)
      add_pair(sums[r][v], weights[v], x + PAIR * ROWS + r);
}

template <int BITS, int ROWS>
QT_NOINLINE void bf16_tile(const Linear& w, const uint8_t* block, const TileActs& x, float* out) {
  constexpr int VECTORS = tile_vectors(ROWS);
  const int groups = w.padded_k / w.group;
  const Metadata meta(w, block, zero_of(BITS));
  for (int i = 0; i < ROWS * BLOCK_COLUMNS; i++) out[i] = 0;
  const uint8_t* steps = block + w.steps_offset;
  const int32_t* values = reinterpret_cast<const int32_t*>(x.values);
  for (int g = 0; g < groups; g++) {
    keep_in_memory();
    vf sums[ROWS][VECTORS];
    QT_UNROLL
    for (int r = 0; r < ROWS; r++)
      QT_UNROLL
      for (int v = 0; v < VECTORS; v++) sums[r][v] = vf{};
#pragma GCC unroll 1
    for (int k = 0; k < w.group; k += 8, steps += steps_of_8(BITS), values += 4 * ROWS) {
      add_pairs<BITS, ROWS, 0>(sums, steps, 0, values);
      add_pairs<BITS, ROWS, 1>(sums, steps, 0, values);
      add_pairs<BITS, ROWS, 2>(sums, steps, 0, values);
      add_pairs<BITS, ROWS, 3>(sums, steps, 0, values);
    }
    add_group<BITS, ROWS>(w, meta, g, 0, sums, static_cast<const float*>(x.sums) + g * ROWS, out);
  }
}

}  // namespace

const TileTable& bf16_tiles(int bits) {
  static constexpr TileTable FOUR = QT_TILE_TABLE(bf16_tile, 4);
  static constexpr TileTable EIGHT = QT_TILE_TABLE(bf16_tile, 8);
  static constexpr TileTable WORD = QT_TILE_TABLE(bf16_tile, 16);
  return bits == 4 ? FOUR : bits == 8 ? EIGHT : WORD;
}

}  // namespace qt

#endif
