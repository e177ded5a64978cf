// Attention's products over integer codes on the matrix unit (AMX), for the rows of a prompt.
//
// An integer of 16 bits is 256 * high + low, high signed, low unsigned: two products of bytes give
// the sums of multiply() in attention_products.h, which are exact, so a row has the same bits on both
// paths. Words of 8-bit codes are what the unit wants as they are, 4 neighbours of 16 columns; those
// of 4-bit codes are unpacked to such.
#pragma once

#include "amx.h"
#include "attention_products.h"
#include "tiles.h"

namespace qt {

// With fewer rows vectors are faster, by 10% with 8: the unit computes MATRIX_ROWS of them whatever they
// are, and takes 0.1 us to start. With 16 the unit is faster by 28%.
constexpr int FEWEST_MATRIX_ROWS = 12;

#if defined(QT_AMX)

static_assert(ROWS % MATRIX_ROWS == 0, "whole tiles");

inline int pieces_of(int neighbours) { return (neighbours + TILE_BYTES - 1) / TILE_BYTES; }

// Whether the unit computes `rows` rows of an item.
inline bool matrix_unit_attends(const KvShape& shape, int rows) {
  if (rows < FEWEST_MATRIX_ROWS || !matrix_unit_allowed()) return false;
  const KvForm form = shape.form();
  const PageLayout at = shape.layout();
  if (form.keys.word == Word::INT4) return true;
  // Keys are read in whole tile registers, beyond the last channel up to the end of the values.
  const int read = pieces_of(int(shape.head_dim)) * TILE * TILE_BYTES;
  return form.keys.word == Word::INT8 && at.keys + read <= at.tile_bytes;
}

// Rows of 16-bit integers in two planes of bytes, zeros up to whole tile registers.
struct Planes {
  static constexpr int STRIDE = MAX_HEAD_DIM + 64;  // as ROW_STRIDE, an odd number of cache lines
  alignas(64) uint8_t high[ROWS][STRIDE], low[ROWS][STRIDE];
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

// Sums of MATRIX_ROWS rows by two blocks of 16 columns, a plane each.
struct PairSums {
  alignas(64) int32_t high[2][MATRIX_ROWS * WIDTH], low[2][MATRIX_ROWS * WIDTH];
};

// Numbers of tile registers.
enum { HIGH_SUMS, LOW_SUMS, HIGH_SUMS_2, LOW_SUMS_2, HIGH, LOW, COLUMNS, COLUMNS_2 };

// A piece of MATRIX_ROWS rows.
static QT_INLINE void load_planes(const Planes& x, int row, int piece) {
  load_tile<HIGH>(x.high[row] + piece * TILE_BYTES, Planes::STRIDE);
  load_tile<LOW>(x.low[row] + piece * TILE_BYTES, Planes::STRIDE);
}

// Column blocks b and, with PAIR, b + 1. With ONE_PIECE the planes are loaded.
template <bool PAIR, bool ONE_PIECE>
static QT_INLINE void multiply_blocks(const MatrixWords& words, int b, const Planes& x, int row,
                                      PairSums& out) {
  clear_tile<HIGH_SUMS>(), clear_tile<LOW_SUMS>();
  if (PAIR) clear_tile<HIGH_SUMS_2>(), clear_tile<LOW_SUMS_2>();
  for (int p = 0; p < (ONE_PIECE ? 1 : words.pieces); p++) {
    if (!ONE_PIECE) load_planes(x, row, p);
    load_tile<COLUMNS>(words.blocks[b] + p * words.piece_bytes, words.stride);
    multiply_tiles<HIGH_SUMS, HIGH, COLUMNS>();
    multiply_unsigned_tiles<LOW_SUMS, LOW, COLUMNS>();
    if (!PAIR) continue;
    load_tile<COLUMNS_2>(words.blocks[b + 1] + p * words.piece_bytes, words.stride);
    multiply_tiles<HIGH_SUMS_2, HIGH, COLUMNS_2>();
    multiply_unsigned_tiles<LOW_SUMS_2, LOW, COLUMNS_2>();
  }
  store_tile<HIGH_SUMS>(out.high[0]), store_tile<LOW_SUMS>(out.low[0]);
  if (PAIR) store_tile<HIGH_SUMS_2>(out.high[1]), store_tile<LOW_SUMS_2>(out.low[1]);
}

// out = a pair's sums, 256 * high + low.
static QT_INLINE void join_planes(const PairSums& sums, int rows, int blocks, float* out) {
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < blocks; i++) {
      const vi sum = (load_vector<vi>(sums.high[i] + r * WIDTH) << 8) +
                     load_vector<vi>(sums.low[i] + r * WIDTH);
      __builtin_memcpy(out + r * ROW_STRIDE + i * WIDTH, &sum, sizeof sum);
    }
}

// Rows from `row` on, one tile of them.
template <bool ONE_PIECE>
static QT_INLINE void multiply_tile(const MatrixWords& words, int row, int rows, const Planes& x,
                                    float* out) {
  PairSums sums[2];
  if (ONE_PIECE) load_planes(x, row, 0);
  // Each pair is joined while the unit works on the next: a product takes it 50 cycles.
  for (int b = 0; b < words.count + 2; b += 2) {
    PairSums &made = sums[b / 2 % 2], &before = sums[b / 2 % 2 ^ 1];
    if (b + 2 <= words.count) multiply_blocks<true, ONE_PIECE>(words, b, x, row, made);
    else if (b < words.count) multiply_blocks<false, ONE_PIECE>(words, b, x, row, made);
    if (b) join_planes(before, rows, std::min(words.count - b + 2, 2),
                       out + row * ROW_STRIDE + (b - 2) * WIDTH);
  }
}

// What multiply() gives of integers.
QT_NOINLINE static void multiply_matrix(const MatrixWords& words, int rows, const Planes& x,
                                        float* out) {
  for (int row = 0; row < rows; row += MATRIX_ROWS) {
    const int count = std::min(rows - row, MATRIX_ROWS);
    words.pieces == 1 ? multiply_tile<true>(words, row, count, x, out)
                      : multiply_tile<false>(words, row, count, x, out);
  }
}

// Words of 8-bit codes in one piece, and whole registers beyond the last. Unpacked or copied ahead of
// the products: a register cannot be loaded from stores that have not reached the cache.
struct MatrixBytes {
  alignas(64) uint8_t bytes[SPLIT * MAX_HEAD_DIM + TILE * TILE_BYTES];
};

// Rows of words to rows of 8-bit codes, of which 4-bit codes give two: neighbours 0 to 3, and 4 to 7.
template <Word WORD>
static QT_INLINE uint8_t* put_bytes(const uint8_t* from, int rows, int row_bytes, uint8_t* to) {
  if (WORD == Word::INT8) {
    std::memcpy(to, from, rows * row_bytes);
    return to + rows * row_bytes;
  }
  for (; rows; rows--, from += row_bytes, to += 2 * row_bytes)
    for (int i = 0; i < row_bytes; i += VECTOR_BYTES) {
      const vu word = load_vector<vu>(from + i);
      const vu low = word & 0x0f0f0f0fu, high = word >> 4 & 0x0f0f0f0fu;
      __builtin_memcpy(to + i, &low, sizeof low);
      __builtin_memcpy(to + row_bytes + i, &high, sizeof high);
    }
  return to;
}

// Words lie `at` bytes behind a tile.
template <Word WORD>
static void put_keys(const Part& part, int head_dim, int at, MatrixBytes& out) {
  uint8_t* to = out.bytes;
  for (int t = part.begin; t < part.end; t += TILE)
    to = put_bytes<WORD>(part.tiles[t / TILE] + at, head_dim / neighbours(WORD), TILE * 4, to);
}
template <Word WORD>
static void put_values(const Part& part, int head_dim, int at, MatrixBytes& out) {
  uint8_t* to = out.bytes;
  for (int t = part.begin; t < part.end; t += TILE)
    to = put_bytes<WORD>(part.tiles[t / TILE] + at, TILE / neighbours(WORD), head_dim * 4, to);
}

// Sums [rows][tokens] of queries times keys: 8-bit codes in their tiles, or else `bytes`.
template <Word WORD>
static void multiply_keys(const Part& part, int head_dim, int at, int rows, const Planes& queries,
                          const MatrixBytes& keys, float* out) {
  MatrixWords words = {{}, TILE * TILE_BYTES, TILE * sizeof(float),
                       (part.last() - part.begin) / TILE, pieces_of(head_dim)};
  for (int b = 0; b < words.count; b++)
    words.blocks[b] = WORD == Word::INT8 ? part.tiles[part.begin / TILE + b] + at
                                         : keys.bytes + b * head_dim * TILE;
  multiply_matrix(words, rows, queries, out);
}

// Sums [rows][width] of weights, ROW_STRIDE floats apart, times values' dimensions from `first` on.
// What a tile has beyond the last token is any bytes, and has weights of 0.
static void multiply_values(const Part& part, int head_dim, int first, int width, int rows,
                            const float* weights, const MatrixBytes& values, float* out) {
  Planes planes;
  const int tokens = part.last() - part.begin;
  for (int r = 0; r < rows; r++)
    split_row(weights + r * ROW_STRIDE, tokens, planes.high[r], planes.low[r]);
  MatrixWords words = {{}, head_dim * TILE_BYTES, head_dim * int64_t(sizeof(float)), width / TILE,
                       pieces_of(tokens)};
  for (int b = 0; b < words.count; b++) words.blocks[b] = values.bytes + first * 4 + b * TILE_BYTES;
  multiply_matrix(words, rows, planes, out);
}

// Keys into the L1 cache: a register's 16 rows would wait for the L2 cache one after the other.
static QT_INLINE void fetch_keys(const uint8_t* keys, int bytes) {
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(keys + i);
}

#else

constexpr bool matrix_unit_attends(const KvShape&, int) { return false; }

#endif

}  // namespace qt
