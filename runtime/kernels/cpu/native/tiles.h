// The tiles of all compute types: one function for each number of rows.
#pragma once

#include "tile_ops.h"

namespace qt {

// Bytes of one activation.
int value_bytes(int compute);

// One tile of rows.
struct TileActs {
  const uint8_t* values;
  const float* scales;
  const void* sums;
};

// out [rows][32] = the rows times one block's columns, without bias.
using TileFn = void (*)(const Linear& w, const uint8_t* block, const TileActs& x, float* out);

struct TileTable {
  TileFn of_rows[TILE_ROWS + 1];
};

const TileTable& int8_tiles(int bits);   // 4, 8
const TileTable& bf16_tiles(int bits);   // 4, 8, 16; only with QT_BF16_DOT
const TileTable& float_tiles(int bits);  // 4, 8, 16, 32

// Scales and zeros of a block's columns; those of symmetric weights are `zero`.
struct Metadata {
  Metadata(const Linear& w, const uint8_t* block, int32_t zero)
      : w(w), block(block), zero(zero) {}

  QT_INLINE vf scales(int group, int vector) const {
    const int index = w.scale_groups == 1 ? 0 : group * BLOCK_COLUMNS;
    return load_scales(w, block, index + vector * WIDTH);
  }
  QT_INLINE vi zeros(int group, int vector) const {
    if (!w.asymmetric) return spread(zero);
    const int scale_bytes = w.scale_type == SCALE_FP32 ? 4 : 2;
    const int index = w.scale_groups == 1 ? 0 : group * BLOCK_COLUMNS;
    const uint8_t* zeros = block + w.scale_groups * scale_bytes * BLOCK_COLUMNS;
    return load_bytes(zeros + index + vector * WIDTH);
  }

  const Linear& w;
  const uint8_t* block;
  int32_t zero;
};

}  // namespace qt

// Functions f<bits, 1>, f<bits, 2>, ... as a TileTable.
#if defined(QT_AVX512)
#define QT_TILE_TABLE(f, bits)                                                             \
  {{nullptr, f<bits, 1>, f<bits, 2>, f<bits, 3>, f<bits, 4>, f<bits, 5>, f<bits, 6>,       \
    f<bits, 7>, f<bits, 8>, f<bits, 9>, f<bits, 10>, f<bits, 11>, f<bits, 12>}}
#else
#define QT_TILE_TABLE(f, bits) \
  {{nullptr, f<bits, 1>, f<bits, 2>, f<bits, 3>, f<bits, 4>, f<bits, 5>, f<bits, 6>}}
#endif
