// Linear layers as Python calls them: lay out, pack, run.
#include <cmath>

#include "gemm.h"
#include "tiles.h"

namespace qt {
namespace {

// Rows computed at a time: their activations stay in the L2 cache while the weights pass by.
constexpr int PANEL = 384;
// Floats of a row converted at a time.
constexpr int PIECE = 512;

enum Dtype : int32_t { DTYPE_FP32 = 0, DTYPE_BF16 = 1 };

// A matrix of rows; the stride counts elements.
struct Matrix {
  void* data;
  int64_t stride;
  int32_t dtype;

  Matrix from_row(int64_t row) const {
    return {static_cast<uint8_t*>(data) + row * stride * (dtype == DTYPE_BF16 ? 2 : 4), stride, dtype};
  }
};

void load_bf16(const Matrix& m, int row, int first, int count, float* to) {
  const uint16_t* from = static_cast<const uint16_t*>(m.data) + row * m.stride + first;
  for (int i = 0; i < count; i++) to[i] = from_bf16(from[i]);
}

void store_row(const Matrix& m, int row, int first, int count, const float* from) {
  if (m.dtype == DTYPE_FP32) {
    copy_columns(static_cast<float*>(m.data) + row * m.stride + first, from, count);
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(m.data) + row * m.stride + first;
  for (int i = 0; i < count; i++) to[i] = to_bf16(from[i]);
}

int scale_bytes(const Linear& w) { return w.bits >= 16 ? 0 : w.scale_type == SCALE_FP32 ? 4 : 2; }

// The steps of one column: `codes` has k items, `to` is the column's first word.
void pack_column(const Linear& w, const uint8_t* codes, uint8_t* to) {
  const int item = w.bits == 32 ? 4 : w.bits == 16 ? 2 : 1;
  for (int k = 0; k < w.padded_k; k += 8, to += w.bits * STEP_BYTES / 4) {
    uint8_t eight[32] = {};
    const int count = w.k - k < 8 ? w.k - k : 8;
    if (count > 0) std::memcpy(eight, codes + size_t(k) * item, count * item);
    uint32_t words[8];
    std::memcpy(words, eight, sizeof words);
    uint16_t half[8];
    std::memcpy(half, eight, sizeof half);
    if (w.bits == 4) words[0] |= words[1] << 4;
    if (w.bits == 16)
      for (int i = 0; i < 4; i++) {
        const int first = i / 2 * 4 + i % 2;
        words[i] = half[first] | uint32_t(half[first + 2]) << 16;
      }
    for (int i = 0; i < w.bits / 4; i++) std::memcpy(to + i * STEP_BYTES, words + i, 4);
  }
}

void pack_block(const Linear& w, int block, const uint8_t* codes, const uint8_t* scales,
                const uint8_t* zeros, uint8_t* out) {
  std::memset(out, 0, w.block_bytes);
  const int item = w.bits == 32 ? 4 : w.bits == 16 ? 2 : 1, bytes = scale_bytes(w);
  uint8_t* out_zeros = out + w.scale_groups * bytes * BLOCK_COLUMNS;
  for (int c = 0; c < BLOCK_COLUMNS; c++) {
    const size_t row = size_t(block) * BLOCK_COLUMNS + c;
    if (row >= size_t(w.n)) return;
    for (int g = 0; g < (bytes ? w.scale_groups : 0); g++) {
      const size_t from = row * w.scale_groups + g, to = size_t(g) * BLOCK_COLUMNS + c;
      std::memcpy(out + to * bytes, scales + from * bytes, bytes);
      if (w.asymmetric) out_zeros[to] = zeros[from];
    }
    pack_column(w, codes + row * w.k * item, out + w.steps_offset + c * 4);
  }
}

// Puts groups of a row, converted a piece at a time where they are not floats.
void put_row(const Acts& a, const Matrix& x, int row, Range groups) {
  if (x.dtype == DTYPE_FP32)
    return acts_put(a, row, static_cast<float*>(x.data) + row * x.stride, groups.begin, groups.end);
  float piece[PIECE];
  const int groups_a_piece = PIECE / a.group;
  for (int first = groups.begin; first < groups.end; first += groups_a_piece) {
    const int end = first + groups_a_piece < groups.end ? first + groups_a_piece : groups.end;
    const int k = first * a.group, stop = end * a.group < a.k ? end * a.group : a.k;
    load_bf16(x, row, k, stop - k, piece);
    acts_put_part(a, row, piece, first, end);
  }
}

void run_panel(const Linear& w, const Acts& a, const Matrix& x, const Matrix& out, int thread,
               int num_threads) {
  const Range groups = share(acts_groups(a), thread, num_threads);
  for (int row = 0; row < a.rows; row++) put_row(a, x, row, groups);
  pool_barrier(thread);
  const Range blocks = share(linear_blocks(w), thread, num_threads);
  gemm(w, a, blocks.begin, blocks.end, [&](int row, int column, const float* values, int count) {
    store_row(out, row, column, count, values);
  });
}

}  // namespace
}  // namespace qt

using qt::Linear;

// The instruction set in use; "amx" only where the system lets this process use it.
QT_API const char* qt_level() { return qt::matrix_unit_allowed() ? "amx" : QT_LEVEL; }

// Fills the fields that follow from n, k, group, bits, compute, scale_type, scale_groups and
// asymmetric. Returns the bytes of packed weights, or 0 for a layer there is no kernel for.
QT_API int64_t qt_linear_layout(Linear* w) {
  const bool known = w->bits == 4 || w->bits == 8 || w->bits == 16 || w->bits == 32;
  if (!known || w->n < 1 || w->k < 1) return 0;
  if (w->group < 8 || w->group > qt::MAX_GROUP || w->group % 8) return 0;
  if (w->compute == qt::INT8 && w->bits >= 16) return 0;
  if (w->compute == qt::BF16 && w->bits == 32) return 0;
  if (w->asymmetric && w->bits != 4) return 0;
  w->padded_k = (w->k + w->group - 1) / w->group * w->group;
  const int meta = w->scale_groups * qt::BLOCK_COLUMNS * (qt::scale_bytes(*w) + w->asymmetric);
  w->steps_offset = (meta + 63) / 64 * 64;
  const int64_t steps = int64_t(w->padded_k) * w->bits / 32;
  w->block_bytes = w->steps_offset + steps * qt::STEP_BYTES;
  return w->block_bytes * qt::linear_blocks(*w);
}

// codes: [n][k] uint8, or bfloat16 or float for dense weights. scales [n][scale_groups] of
// scale_type, zeros the same shape in uint8; null where there are none. out: 64-byte aligned.
QT_API void qt_linear_pack(const Linear* w, const void* codes, const void* scales,
                           const void* zeros, void* out) {
  auto body = [&](int thread, int num_threads) {
    const qt::Range blocks = qt::share(qt::linear_blocks(*w), thread, num_threads);
    for (int block = blocks.begin; block < blocks.end; block++)
      qt::pack_block(*w, block, static_cast<const uint8_t*>(codes),
                     static_cast<const uint8_t*>(scales), static_cast<const uint8_t*>(zeros),
                     static_cast<uint8_t*>(out) + block * w->block_bytes);
  };
  qt::pool_run(body);
}

// Bytes of workspace for qt_linear_run.
QT_API int64_t qt_linear_workspace(const Linear* w, int64_t rows) {
  return int64_t(qt::acts_bytes(*w, int(rows < qt::PANEL ? rows : qt::PANEL)));
}

// out [rows][n] = x [rows][k] times w. Types: 0 float, 1 bfloat16. Strides count elements. The
// workspace is 64-byte aligned.
QT_API void qt_linear_run(const Linear* w, const void* x, int32_t x_type, int64_t x_stride,
                          void* out, int32_t out_type, int64_t out_stride, int64_t rows,
                          void* workspace) {
  const qt::Matrix from = {const_cast<void*>(x), x_stride, x_type}, to = {out, out_stride, out_type};
  auto body = [&](int thread, int num_threads) {
    for (int64_t row = 0; row < rows; row += qt::PANEL) {
      const int count = int(rows - row < qt::PANEL ? rows - row : qt::PANEL);
      const qt::Acts a = qt::acts_at(*w, count, workspace);
      if (row) qt::pool_barrier(thread);  // the others still read the last panel's activations
      qt::run_panel(*w, a, from.from_row(row), to.from_row(row), thread, num_threads);
    }
  };
  qt::pool_run(body);
}
