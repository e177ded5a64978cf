// Tiles whose activations are float.
#include "weights.h"

namespace qt {
namespace {

template <int BITS, int ROWS, int J>
QT_INLINE void add_products(vf (&sums)[ROWS][tile_vectors(ROWS)], const uint8_t* steps, int first,
                            const float* x) {
  constexpr int VECTORS = tile_vectors(ROWS);
  vf weights[VECTORS];
  QT_UNROLL
  for (int v = 0; v < VECTORS; v++) {
    weights[v] = weight<BITS, J>(steps, first + v);
    pin(weights[v]);
  }
  QT_UNROLL
  for (int r = 0; r < ROWS; r++)
    QT_UNROLL
    for (int v = 0; v < VECTORS; v++)
      add_product(sums[r][v], weights[v], x + J * ROWS + r);
}

template <int BITS, int ROWS>
QT_NOINLINE void float_tile(const Linear& w, const uint8_t* block, const TileActs& x, float* out) {
  constexpr int VECTORS = tile_vectors(ROWS);
  const int groups = w.padded_k / w.group;
  const Metadata meta(w, block, zero_of(BITS));
  for (int i = 0; i < ROWS * BLOCK_COLUMNS; i++) out[i] = 0;
  for (int first = 0; first < BLOCK_COLUMNS / WIDTH; first += VECTORS) {
    const uint8_t* steps = block + w.steps_offset;
    const float* values = reinterpret_cast<const float*>(x.values);
    for (int g = 0; g < groups; g++) {
      keep_in_memory();
      vf sums[ROWS][VECTORS];
      QT_UNROLL
      for (int r = 0; r < ROWS; r++)
        QT_UNROLL
        for (int v = 0; v < VECTORS; v++) sums[r][v] = vf{};
#pragma GCC unroll 1
      for (int k = 0; k < w.group; k += 8, steps += steps_of_8(BITS), values += 8 * ROWS) {
        add_products<BITS, ROWS, 0>(sums, steps, first, values);
        add_products<BITS, ROWS, 1>(sums, steps, first, values);
        add_products<BITS, ROWS, 2>(sums, steps, first, values);
        add_products<BITS, ROWS, 3>(sums, steps, first, values);
        add_products<BITS, ROWS, 4>(sums, steps, first, values);
        add_products<BITS, ROWS, 5>(sums, steps, first, values);
        add_products<BITS, ROWS, 6>(sums, steps, first, values);
        add_products<BITS, ROWS, 7>(sums, steps, first, values);
      }
      add_group<BITS, ROWS>(w, meta, g, first, sums,
                            static_cast<const float*>(x.sums) + g * ROWS, out);
    }
  }
}

}  // namespace

const TileTable& float_tiles(int bits) {
  static constexpr TileTable FOUR = QT_TILE_TABLE(float_tile, 4), EIGHT = QT_TILE_TABLE(float_tile, 8);
  static constexpr TileTable WORD = QT_TILE_TABLE(float_tile, 16), FLOAT = QT_TILE_TABLE(float_tile, 32);
  return bits == 4 ? FOUR : bits == 8 ? EIGHT : bits == 16 ? WORD : FLOAT;
}

}  // namespace qt
