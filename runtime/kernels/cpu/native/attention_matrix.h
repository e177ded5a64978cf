// Attention's products over int8 pages on the matrix unit (AMX), for the rows of a prompt.
//
// An integer of 16 bits is 256 * high + low, high signed, low unsigned: two products of bytes give
// the sums of multiply() in attention_products.h, which are exact, so a row has the same bits on both
// paths. Stored words are what the unit wants as they are: 4 neighbours of 16 columns.
#pragma once

#include "amx.h"
#include "attention_products.h"
#include "tiles.h"

namespace qt {

// Rows below which vectors are faster: the unit computes MATRIX_ROWS of them whatever they are.
constexpr int FEWEST_MATRIX_ROWS = 8;

#if defined(QT_AMX)

static_assert(ROWS <= MATRIX_ROWS, "an item's rows are one tile");

// Whether the unit computes `rows` rows of an item.
inline bool matrix_unit_attends(const KvShape& shape, int rows) {
  // Keys are read in whole tile registers, beyond the last channel up to the end of the values.
  return shape.kind == KV_INT8 && rows >= FEWEST_MATRIX_ROWS && 2 * shape.head_dim >= TILE_BYTES &&
         matrix_unit_allowed();
}

inline int pieces_of(int neighbours) { return (neighbours + TILE_BYTES - 1) / TILE_BYTES; }

// Rows of 16-bit integers in two planes of bytes, zeros up to whole tile registers.
struct Planes {
  alignas(64) uint8_t high[MATRIX_ROWS][MAX_HEAD_DIM], low[MATRIX_ROWS][MAX_HEAD_DIM];
};

// `integers` [count], a multiple of 16, in the order of a stored word's bytes.
static QT_INLINE void split_row(const float* integers, int count, uint8_t* high, uint8_t* low) {
  // Packing takes 8 from the one and the other in turn; words have their neighbours 0, 2, 1, 3.
  const __m512i eights = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
  const __m512i words = _mm512_broadcast_i32x4(
      _mm_set_epi8(15, 13, 14, 12, 11, 9, 10, 8, 7, 5, 6, 4, 3, 1, 2, 0));
  const auto in_order = [&](__m512i packed) {
    return _mm512_shuffle_epi8(_mm512_permutexvar_epi64(eights, packed), words);
  };
  const __m512i byte = _mm512_set1_epi16(255);
  const auto* from = reinterpret_cast<const uint8_t*>(integers);
  for (int i = 0; i < count; i += 64, from += 128) {
    const uint64_t here = count - i < 64 ? (uint64_t(1) << (count - i)) - 1 : ~uint64_t(0);
    const __m512i a = _mm512_maskz_loadu_epi16(__mmask32(here), from);
    const __m512i b = _mm512_maskz_loadu_epi16(__mmask32(here >> 32), from + 64);
    const __m512i lows = _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte));
    const __m512i highs = _mm512_packs_epi16(_mm512_srai_epi16(a, 8), _mm512_srai_epi16(b, 8));
    _mm512_store_si512(low + i, in_order(lows));
    _mm512_store_si512(high + i, in_order(highs));
  }
}

// Stored words as tile registers: piece p of 64 neighbours of column block b lies at
// blocks[b] + p * piece_bytes, a row of 16 words `stride` apart.
struct MatrixWords {
  const uint8_t* blocks[MAX_HEAD_DIM / 16];
  int64_t piece_bytes, stride;
  int count, pieces;
};

// Numbers of tile registers.
enum { HIGH_SUMS, LOW_SUMS, HIGH_SUMS_2, LOW_SUMS_2, HIGH, LOW, COLUMNS, COLUMNS_2 };

// out = the first `rows` rows times column blocks b and, with PAIR, b + 1.
template <bool PAIR>
static QT_INLINE void multiply_blocks(const MatrixWords& words, int b, int rows, const Planes& x,
                                      int32_t* out) {
  clear_tile<HIGH_SUMS>(), clear_tile<LOW_SUMS>();
  if (PAIR) clear_tile<HIGH_SUMS_2>(), clear_tile<LOW_SUMS_2>();
  for (int p = 0; p < words.pieces; p++) {
    load_tile<HIGH>(x.high[0] + p * TILE_BYTES, MAX_HEAD_DIM);
    load_tile<LOW>(x.low[0] + p * TILE_BYTES, MAX_HEAD_DIM);
    load_tile<COLUMNS>(words.blocks[b] + p * words.piece_bytes, words.stride);
    multiply_tiles<HIGH_SUMS, HIGH, COLUMNS>();
    multiply_unsigned_tiles<LOW_SUMS, LOW, COLUMNS>();
    if (!PAIR) continue;
    load_tile<COLUMNS_2>(words.blocks[b + 1] + p * words.piece_bytes, words.stride);
    multiply_tiles<HIGH_SUMS_2, HIGH, COLUMNS_2>();
    multiply_unsigned_tiles<LOW_SUMS_2, LOW, COLUMNS_2>();
  }
  alignas(64) int32_t sums[4][MATRIX_ROWS * WIDTH];
  store_tile<HIGH_SUMS>(sums[0]), store_tile<LOW_SUMS>(sums[1]);
  if (PAIR) store_tile<HIGH_SUMS_2>(sums[2]), store_tile<LOW_SUMS_2>(sums[3]);
  for (int r = 0; r < rows; r++)
    QT_UNROLL
    for (int i = 0; i < 1 + PAIR; i++) {
      const vi high = load_vector<vi>(sums[2 * i] + r * WIDTH);
      const vi sum = (high << 8) + load_vector<vi>(sums[2 * i + 1] + r * WIDTH);
      __builtin_memcpy(out + r * ROW_STRIDE + (b + i) * WIDTH, &sum, sizeof sum);
    }
}

// What multiply<KV_INT8> gives.
QT_NOINLINE static void multiply_matrix(const MatrixWords& words, int rows, const Planes& x,
                                        float* out) {
  int b = 0;
  auto* to = reinterpret_cast<int32_t*>(out);
  for (; b + 2 <= words.count; b += 2) multiply_blocks<true>(words, b, rows, x, to);
  if (b < words.count) multiply_blocks<false>(words, b, rows, x, to);
}

#else

constexpr bool matrix_unit_attends(const KvShape&, int) { return false; }

#endif

}  // namespace qt
