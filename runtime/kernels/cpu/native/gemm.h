// y = x W^T + b with a quantized W: the interface for code that runs inside a pool region.
//
// A thread first puts rows into activations (acts_put), meets the others at a barrier, then computes
// its columns (gemm). No function here allocates, locks or has a barrier inside.
//
// A row's result has the same bits whatever rows it is computed with: sums inside a group are
// integers (int8) or run over k in order (bf16, fp32), and groups are added in order. The matrix unit
// (AMX) gives the bits of the vector tiles for the same reason.
//
// Weights. Blocks of 32 columns (output features), one after the other, so that a thread that takes
// neighbouring blocks reads one rising stream. In a block:
//   scales  [groups][32], 2 or 4 bytes each
//   zeros   [groups][32] uint8, asymmetric weights only; then up to a multiple of 64 bytes
//   steps   128 bytes each, for each of 32 columns 4 bytes with its next 32 / bits codes.
//           4 bits: byte j has k + j in its low half and k + 4 + j in its high half.
// weight = scale * (code - zero), zero = 2^(bits - 1) for symmetric weights.
//
// Activations. Rows are cut into even tiles. A tile of R rows is
//   int8  [K / 4][R][4] int8, x = scale * value, one scale a row and group, 127 = largest magnitude
//         [groups][R][group] int8 for the matrix unit
//   bf16  [K / 4][2][R][2] bfloat16: k and k + 2, then k + 1 and k + 3
//   fp32  [K][R] float
// and beside it scales and sums [groups][R].
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "pool.h"

namespace qt {

enum Compute : int32_t { INT8 = 0, BF16 = 1, FP32 = 2 };
enum ScaleType : int32_t { SCALE_FP16 = 0, SCALE_BF16 = 1, SCALE_FP32 = 2 };

constexpr int BLOCK_COLUMNS = 32;
constexpr int STEP_BYTES = 128;
constexpr int MAX_GROUP = 128;  // code * value sums and 8 bit zero * sum stay in 32 and 16 bits
// Rows that gemm computes before it hands out results: 12 or 16 tiles. The matrix unit prepares a
// block's weights once for them, which costs it 5% of the time.
constexpr int PANEL_ROWS = 192;
// Bytes of activations that stay in the L2 cache while weights pass by.
constexpr int PANEL_BYTES = 1 << 20;

// One linear layer, made by qt_linear_layout and qt_linear_pack. Plain data: the same struct is
// declared in native_ops.py.
struct Linear {
  const uint8_t* data;  // 64-byte aligned
  const float* bias;    // [blocks * 32], 0 beyond n; or null
  int64_t block_bytes;
  int32_t n, k;          // output and input features
  int32_t padded_k;      // k up to a multiple of group
  int32_t group;         // neighbours in k that share a scale of W and of x; a multiple of 8
  int32_t bits;          // 4, 8; 16 (bfloat16) and 32 (float) are dense and have no scales
  int32_t compute;       // Compute
  int32_t scale_type;    // ScaleType
  int32_t scale_groups;  // groups that have scales of their own; 1: one scale a column
  int32_t asymmetric;    // 1: zeros are stored
  int32_t steps_offset;  // bytes before the steps
};

inline int linear_blocks(const Linear& w) { return (w.n + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS; }

// Rows of x in the form w computes with. A view: copy it freely.
struct Acts {
  uint8_t* values;
  float* scales;  // [padded_k / group] a row, int8 only
  void* sums;     // the same shape: int32 minus the sum of the values (int8), float sum (others)
  int32_t rows, k, padded_k, group, compute;
  int32_t value_bytes;  // of one activation
  int32_t tiles, tile_rows, larger_tiles;  // the first larger_tiles have a row more than tile_rows
  bool by_rows;         // laid out for the matrix unit, which needs no sums
};

// Bytes of 64-byte aligned memory for `rows` rows of w's input, and the view on it. Linears of one
// k, group, bits class and compute read the same activations (qkv and nothing else as a rule).
size_t acts_bytes(const Linear& w, int rows);
Acts acts_at(const Linear& w, int rows, void* memory);

// Units of a row that can be put independently. Split threads over these, not over rows: rows of
// one tile share cache lines.
inline int acts_groups(const Acts& a) { return a.padded_k / a.group; }

// Puts groups [first, end) of one row; x points at the row's first of k floats. A value that is not
// finite makes all results of the row not finite.
void acts_put(const Acts& a, int row, const float* x, int first, int end);

// The same with x pointing at the first group's first float.
void acts_put_part(const Acts& a, int row, const float* x, int first, int end);

// Rows of x that one tile computes, [begin, end).
inline Range row_tile(const Acts& a, int tile) {
  const int more = tile < a.larger_tiles ? tile : a.larger_tiles;
  const int begin = tile * a.tile_rows + more;
  return {begin, begin + a.tile_rows + (tile < a.larger_tiles)};
}
inline int most_rows(const Acts& a) { return a.tile_rows + (a.larger_tiles > 0); }

// The matrix unit made ready for a thread's products, where activations are for it.
class MatrixUnit {
 public:
  explicit MatrixUnit(const Acts& a);
  ~MatrixUnit();
  MatrixUnit(const MatrixUnit&) = delete;

 private:
  const bool used_;
};

// out [rows of the tiles][32] = the rows of some tiles, PANEL_ROWS at most, times the columns of one
// block, bias included. Columns beyond n are 0. `out` is 64-byte aligned.
void gemm_block(const Linear& w, const Acts& a, Range tiles, int block, float* out);

// What most callers do with results: copies up to 32 of them. A call of memcpy takes longer.
inline void copy_columns(float* to, const float* from, int count) {
  if (count == BLOCK_COLUMNS)
    std::memcpy(to, from, BLOCK_COLUMNS * sizeof *to);
  else
    std::memcpy(to, from, count * sizeof *to);
}

// All rows times the columns of blocks [first, end). emit(row, column, values, count) takes up to 32
// neighbouring results of one row; they are gone after the call.
template <class Emit>
void gemm(const Linear& w, const Acts& a, int first, int end, Emit emit) {
  alignas(64) float out[PANEL_ROWS * BLOCK_COLUMNS];
  const MatrixUnit unit(a);
  const int fitting = PANEL_BYTES / (a.padded_k * a.value_bytes);
  const int panel_rows = fitting < PANEL_ROWS ? fitting : PANEL_ROWS;
  const int step = panel_rows < most_rows(a) ? 1 : panel_rows / most_rows(a);
  for (int tile = 0; tile < a.tiles; tile += step) {
    const Range panel = {tile, tile + step < a.tiles ? tile + step : a.tiles};
    const Range rows = {row_tile(a, panel.begin).begin, row_tile(a, panel.end - 1).end};
    for (int block = first; block < end; block++) {
      const int column = block * BLOCK_COLUMNS;
      const int count = w.n - column < BLOCK_COLUMNS ? w.n - column : BLOCK_COLUMNS;
      gemm_block(w, a, panel, block, out);
      for (int row = rows.begin; row < rows.end; row++)
        emit(row, column, out + (row - rows.begin) * BLOCK_COLUMNS, count);
    }
  }
}

}  // namespace qt
