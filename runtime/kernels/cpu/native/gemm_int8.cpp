// Tiles whose activations are int8: integer sums inside a group, float32 across groups.
#include "tiles.h"

namespace qt {
namespace {

template <int BITS, int ROWS>
QT_NOINLINE void int8_tile(const TileWeights& w, const TileActs& x, float* out) {
  constexpr int VECTORS = tile_vectors(ROWS);
  // Two chains of sums hide the product's latency where rows are too few to.
  constexpr int CHAINS = 2 * ROWS * VECTORS <= MAX_DOUBLED ? 2 : 1;
  for (int first = 0; first < BLOCK_COLUMNS / WIDTH; first += VECTORS) {
    const uint8_t* steps = w.steps;
    const int8_t* values = reinterpret_cast<const int8_t*>(x.values);
    for (int g = 0; g < w.groups; g++) {
      if (ROWS > 2) keep_in_memory();
      vi sums[CHAINS][ROWS][VECTORS];
      QT_UNROLL
      for (int c = 0; c < CHAINS; c++)
        QT_UNROLL
        for (int r = 0; r < ROWS; r++)
          QT_UNROLL
          for (int v = 0; v < VECTORS; v++) sums[c][r][v] = vi{};
#pragma GCC unroll 1
      for (int k = 0; k < w.group; k += 8, steps += steps_of_8(BITS), values += 8 * ROWS) {
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
        const int column = (first + v) * WIDTH;
        const vf scale = load_vector<vf>(w.scales + g * BLOCK_COLUMNS + column);
        const vi zeros = load_vector<vi>(w.zeros + g * BLOCK_COLUMNS + column);
        QT_UNROLL
        for (int r = 0; r < ROWS; r++) {
          vi sum = sums[0][r][v];
          if (CHAINS == 2) sum += sums[1][r][v];
          sum = subtract_zeros(sum, zeros, minus_sums[r]);
          float* to = out + r * BLOCK_COLUMNS + column;
          store_vector(to, add_scaled(sum, scale, scales[r], load_vector<vf>(to)));
        }
      }
    }
  }
}

template <int BITS, size_t... ROW>
constexpr TileTable table(std::index_sequence<ROW...>) {
  return {{nullptr, int8_tile<BITS, int(ROW) + 1>...}};
}

}  // namespace

const TileTable& int8_tiles(int bits) {
  static constexpr auto ROWS = std::make_index_sequence<TILE_ROWS>();
  static constexpr TileTable FOUR = table<4>(ROWS), EIGHT = table<8>(ROWS);
  return bits == 4 ? FOUR : EIGHT;
}

}  // namespace qt
