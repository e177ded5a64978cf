// Which tile computes what.
#include "gemm.h"

#include "tiles.h"

namespace qt {

int num_row_tiles(int rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }

Range row_tile(int rows, int tile) { return share(rows, tile, num_row_tiles(rows)); }

static const TileTable& tiles_of(const Linear& w) {
  if (w.compute == INT8) return int8_tiles(w.bits);
#if defined(QT_BF16_DOT)
  if (w.compute == BF16) return bf16_tiles(w.bits);
#endif
  return float_tiles(w.bits);
}

void gemm_tile(const Linear& w, const Acts& a, int tile, int block, float* out) {
  const Range rows = row_tile(a.rows, tile);
  const int count = rows.end - rows.begin;
  const size_t before = size_t(rows.begin) * (a.padded_k / a.group);
  const TileActs x = {
      a.values + size_t(rows.begin) * a.padded_k * value_bytes(a.compute),
      a.scales + before,
      static_cast<const int32_t*>(a.sums) + before,
  };
  tiles_of(w).of_rows[count](w, w.data + block * w.block_bytes, x, out);
  if (!w.bias) return;
  for (int r = 0; r < count; r++)
    for (int c = 0; c < BLOCK_COLUMNS; c++)
      out[r * BLOCK_COLUMNS + c] += w.bias[block * BLOCK_COLUMNS + c];
}

}  // namespace qt
