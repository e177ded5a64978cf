// The tiles of all compute types: one function for each number of rows.
#pragma once

#include <utility>

#include "tile_ops.h"

namespace qt {

// Some groups of one block.
struct TileWeights {
  const uint8_t* steps;  // gemm.h; of unpacked codes for the matrix unit
  const float* scales;   // [groups][32]
  const int32_t* zeros;  // [groups][32]
  int32_t groups, group;
  const uint8_t* ahead;  // packed weights to be fetched meanwhile, or null
  int32_t group_bytes;   // of one group of them
};

// The same groups of one tile of rows.
struct TileActs {
  const uint8_t* values;
  const float* scales;
  const void* sums;
};

// out [rows][32] += the rows times one block's columns.
using TileFn = void (*)(const TileWeights& w, const TileActs& x, float* out);

struct TileTable {
  TileFn of_rows[TILE_ROWS + 1];
};

const TileTable& int8_tiles(int bits);   // 4, 8
const TileTable& bf16_tiles(int bits);   // 4, 8, 16; only with QT_BF16_DOT
const TileTable& float_tiles(int bits);  // 4, 8, 16, 32

// The zero that tiles take off codes of symmetric weights.
inline int32_t symmetric_zero(int bits, int compute) {
  return bits == 4 ? 8 : compute == INT8 ? ZERO_OF_8_BITS : 128;
}

// Bytes of a block's steps for 8 neighbours in k.
constexpr int steps_of_8(int bits) { return bits * STEP_BYTES / 4; }

// ---- the matrix unit (gemm_amx.cpp)

// Whether there is one and the system lets this process use it.
bool matrix_unit_allowed();
// Whether it computes so many rows of w's input.
bool matrix_unit_for(const Linear& w, int rows);
constexpr int MATRIX_ROWS = 16;  // of a tile

#if defined(QT_AMX)
// Codes minus zeros as int8: steps of 128 bytes, for each of 32 columns 4 neighbours in k.
void unpack(const TileWeights& w, int bits, uint8_t* out);
#endif
// A TileFn for 1 to MATRIX_ROWS rows; w has unpacked codes, x is laid out by rows.
void matrix_tile(int rows, const TileWeights& w, const TileActs& x, float* out);

}  // namespace qt
