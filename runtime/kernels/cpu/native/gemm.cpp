// Which tile computes what: a block's weights made ready in pieces, every tile of rows over each.
#include "gemm.h"

#include "tiles.h"

namespace qt {
namespace {

const TileTable& tiles_of(const Linear& w) {
  if (w.compute == INT8) return int8_tiles(w.bits);
#if defined(QT_BF16_DOT)
  if (w.compute == BF16) return bf16_tiles(w.bits);
#endif
  return float_tiles(w.bits);
}

// Neighbours in k that are made ready at a time. Unpacked they are 8 KiB, which stay in the L1 cache
// beside their activations and products; 512 took a fifth longer with 16 rows.
constexpr int PIECE = 256;
constexpr int PIECE_GROUPS = PIECE / 8;  // at most, with the smallest group
// How far before their use the matrix unit's weights are fetched, while it computes: with 8 and 16 rows
// and weights in memory this takes a fifth to a quarter less time, and none more where they are cached.
constexpr int AHEAD_BYTES = 4096;

// Scales and zeros of a piece in the form tiles read, so that no tile asks for their types.
struct Metadata {
  alignas(64) float scales[PIECE_GROUPS * BLOCK_COLUMNS];
  alignas(64) int32_t zeros[PIECE_GROUPS * BLOCK_COLUMNS];
};

void read_scales(const Linear& w, const uint8_t* block, Range groups, float* to) {
  for (int g = groups.begin; g < groups.end; g++)
    for (int c = 0; c < BLOCK_COLUMNS; c += WIDTH, to += WIDTH)
      store_vector(to, load_scales(w, block, (w.scale_groups == 1 ? 0 : g) * BLOCK_COLUMNS + c));
}

void read_zeros(const Linear& w, const uint8_t* block, Range groups, int32_t* to) {
  const int scale_bytes = w.scale_type == SCALE_FP32 ? 4 : 2;
  const uint8_t* zeros = block + w.scale_groups * scale_bytes * BLOCK_COLUMNS;
  for (int g = groups.begin; g < groups.end; g++)
    for (int c = 0; c < BLOCK_COLUMNS; c += WIDTH, to += WIDTH) {
      const vi v = load_bytes(zeros + (w.scale_groups == 1 ? 0 : g) * BLOCK_COLUMNS + c);
      std::memcpy(to, &v, sizeof v);
    }
}

}  // namespace

void gemm_block(const Linear& w, const Acts& a, Range tiles, int block, float* out) {
  const int groups = acts_groups(a), groups_a_piece = PIECE / w.group;
  const int first_row = row_tile(a, tiles.begin).begin;
  const int rows = row_tile(a, tiles.end - 1).end - first_row;
  const uint8_t* data = w.data + block * w.block_bytes;
  const TileTable& table = tiles_of(w);
  std::memset(out, 0, size_t(rows) * BLOCK_COLUMNS * sizeof *out);
  Metadata meta;
  if (!w.asymmetric)
    for (int i = 0; i < groups_a_piece * BLOCK_COLUMNS; i++)
      meta.zeros[i] = symmetric_zero(w.bits, w.compute);
  for (int first = 0; first < groups; first += groups_a_piece) {
    const Range piece = {first, first + groups_a_piece < groups ? first + groups_a_piece : groups};
    if (w.bits < 16) read_scales(w, data, piece, meta.scales);
    if (w.asymmetric) read_zeros(w, data, piece, meta.zeros);
    TileWeights weights = {data + w.steps_offset + int64_t(first) * w.group * w.bits * 4,
                           meta.scales, meta.zeros, piece.end - piece.begin, w.group,
                           nullptr, w.group * w.bits * 4};
#if defined(QT_AMX)
    alignas(64) uint8_t codes[PIECE * BLOCK_COLUMNS];
    if (a.by_rows) {
      unpack(weights, w.bits, codes);
      weights.ahead = weights.steps + AHEAD_BYTES;
      weights.steps = codes;
    }
#endif
    for (int tile = tiles.begin; tile < tiles.end; tile++) {
      const Range range = row_tile(a, tile);
      const int count = range.end - range.begin;
      const size_t before = size_t(range.begin) * groups + size_t(first) * count;
      const size_t values = size_t(range.begin) * a.padded_k + size_t(first) * w.group * count;
      const TileActs x = {
          a.values + values * a.value_bytes,
          a.scales + before,
          static_cast<const int32_t*>(a.sums) + before,
      };
      float* to = out + (range.begin - first_row) * BLOCK_COLUMNS;
      a.by_rows ? matrix_tile(count, weights, x, to) : table.of_rows[count](weights, x, to);
      weights.ahead = nullptr;
    }
  }
  if (!w.bias) return;
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < BLOCK_COLUMNS; c++)
      out[r * BLOCK_COLUMNS + c] += w.bias[block * BLOCK_COLUMNS + c];
}

}  // namespace qt
