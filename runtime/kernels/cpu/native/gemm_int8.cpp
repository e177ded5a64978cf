// Tiles whose activations are int8: integer sums inside a group, float32 across groups.
#include "tiles.h"

namespace qt {
namespace {

template <int BITS, int ROWS>
QT_NOINLINE void int8_tile(const Linear& w, const uint8_t* block, const TileActs& x, float* out) {
  constexpr int VECTORS = tile_vectors(ROWS);
  // Two chains of sums hide the product's latency where rows are too few to.
  constexpr int CHAINS = 2 * ROWS * VECTORS <= MAX_DOUBLED ? 2 : 1;
  constexpr int STEPS_OF_8 = BITS * STEP_BYTES / 4;
  const int groups = w.padded_k / w.group;
  const Metadata meta(w, block, BITS == 4 ? 8 : ZERO_OF_8_BITS);
  for (int i = 0; i < ROWS * BLOCK_COLUMNS; i++) out[i] = 0;
  for (int first = 0; first < BLOCK_COLUMNS / WIDTH; first += VECTORS) {
    const uint8_t* steps = block + w.steps_offset;
    const int8_t* values = reinterpret_cast<const int8_t*>(x.values);
    for (int g = 0; g < groups; g++) {
      if (ROWS > 2) keep_in_memory();
      vi sums[CHAINS][ROWS][VECTORS];
      QT_UNROLL
      for (int c = 0; c < CHAINS; c++)
        QT_UNROLL
        for (int r = 0; r < ROWS; r++)
          QT_UNROLL
          for (int v = 0; v < VECTORS; v++) sums[c][r][v] = vi{};
#pragma GCC unroll 1
      for (int k = 0; k < w.group; k += 8, steps += STEPS_OF_8, values += 8 * ROWS) {
        vi low[VECTORS], high[VECTORS];
        QT_UNROLL
        for (int v = 0; v < VECTORS; v++) load_codes<BITS>(steps, first + v, low[v], high[v]);
        QT_UNROLL
        for (int r = 0; r < ROWS; r++)
          QT_UNROLL
          for (int v = 0; v < VECTORS; v++)
            dot8<BITS>(sums[0][r][v], sums[CHAINS - 1][r][v], low[v], high[v], values + 4 * r,
                       4 * ROWS);
      }
      const float* scales = x.scales + g * ROWS;
      const int32_t* minus_sums = static_cast<const int32_t*>(x.sums) + g * ROWS;
      QT_UNROLL
      for (int v = 0; v < VECTORS; v++) {
        const vf scale = meta.scales(g, first + v);
        const vi zeros = meta.zeros(g, first + v);
        QT_UNROLL
        for (int r = 0; r < ROWS; r++) {
          vi sum = sums[0][r][v];
          if (CHAINS == 2) sum += sums[1][r][v];
          sum = subtract_zeros(sum, zeros, minus_sums[r]);
          float* to = out + r * BLOCK_COLUMNS + (first + v) * WIDTH;
          const vf factor = scale * spread(scales[r]);
          store_vector(to, multiply_add(to_float(sum), factor, load_vector<vf>(to)));
        }
      }
    }
  }
}

}  // namespace

const TileTable& int8_tiles(int bits) {
  static constexpr TileTable FOUR = QT_TILE_TABLE(int8_tile, 4), EIGHT = QT_TILE_TABLE(int8_tile, 8);
  return bits == 4 ? FOUR : EIGHT;
}

}  // namespace qt
