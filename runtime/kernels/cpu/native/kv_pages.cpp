// Keys and values into pages.
#include "kv_pages.h"

namespace qt {
namespace {

struct Grid {
  float step, minimum, middle;
};

// The middle is not finite if an element is not.
Grid int8_grid(const float* x, int n) {
  f32x16 low = loadf(x), high = low, nothing = low * 0.f;
  for (int i = LANES; i < n; i += LANES) {
    const f32x16 v = loadf(x + i);
    high = max(high, v);
    low = -max(-low, -v);
    nothing += v * 0.f;
  }
  const float minimum = -highest(-low), step = (highest(high) - minimum) * (1.f / 255);
  return {step, minimum, minimum + 128 * step + sum(nothing)};
}

// 16 codes in their lowest bytes, rounded to nearest, ties to even, by adding 1.5 * 2**23; NaN becomes
// some code.
void int8_codes(const float* x, Grid grid, float inverse, uint32_t* codes) {
  const f32x16 scaled = (loadf(x) - grid.minimum) * inverse;
  const f32x16 cut = scaled > 255.f ? all(255.f) : scaled > 0.f ? scaled : f32x16{};
  const u32x16 rounded = ((u32x16)(cut + 12582912.f) ^ 128u) & 255u;
  std::memcpy(codes, &rounded, sizeof rounded);
}

void store_fp32(int D, float* tile, int lane, const float* key, const float* value) {
  for (int d = 0; d < D; d++) tile[d * TILE + lane] = key[d];
  std::memcpy(tile + (TILE + lane) * D, value, D * sizeof(float));
}

void store_bf16(int D, uint16_t* tile, int lane, const float* key, const float* value) {
  for (int d = 0; d < D; d++) tile[(d / 2 * TILE + lane) * 2 + d % 2] = to_bf16(key[d]);
  uint16_t* to = tile + (TILE + lane / 2 * 2) * D + lane % 2;
  for (int d = 0; d < D; d++) to[d * 2] = to_bf16(value[d]);
}

// Where neighbour i of a word of codes lies.
constexpr int byte_of(int i) { return i == 1 ? 2 : i == 2 ? 1 : i; }

void store_int8(int D, uint8_t* tile, int lane, const float* key, const float* value) {
  const Grid grids[2] = {int8_grid(key, D), int8_grid(value, D)};
  float inverses[2];
  for (int i = 0; i < 2; i++) {
    inverses[i] = grids[i].step > 0 ? 1 / grids[i].step : 0;
    float* to = reinterpret_cast<float*>(tile) + 2 * i * TILE + lane;
    to[0] = grids[i].step, to[TILE] = grids[i].middle;
  }
  uint8_t *keys = tile + GRID_FLOATS * sizeof(float), *values = keys + D * TILE;
  uint8_t* to = values + lane / 4 * D * 4 + byte_of(lane % 4);
  for (int d = 0; d < D; d += LANES) {
    uint32_t codes[LANES];
    int8_codes(key + d, grids[0], inverses[0], codes);
    for (int i = 0; i < LANES; i += 4) {
      const uint32_t word = codes[i] | codes[i + 2] << 8 | codes[i + 1] << 16 | codes[i + 3] << 24;
      std::memcpy(keys + ((d + i) / 4 * TILE + lane) * 4, &word, sizeof word);
    }
    int8_codes(value + d, grids[1], inverses[1], codes);
    for (int i = 0; i < LANES; i++) to[(d + i) * 4] = uint8_t(codes[i]);
  }
}

}  // namespace

void kv_store(const KvShape& shape, uint8_t* tile, int lane, const float* key, const float* value) {
  const int D = int(shape.head_dim);
  if (shape.kind == KV_FP32) store_fp32(D, reinterpret_cast<float*>(tile), lane, key, value);
  else if (shape.kind == KV_BF16) store_bf16(D, reinterpret_cast<uint16_t*>(tile), lane, key, value);
  else store_int8(D, tile, lane, key, value);
}

}  // namespace qt

int64_t qt_tile_bytes(const qt::KvShape* shape) { return int64_t(shape->tile_bytes()); }

void qt_kv_store(const qt::KvShape* shape, uint8_t* pages, const float* keys, const float* values,
                 const int64_t* slots, int64_t tokens) {
  for (int64_t i = 0; i < tokens; i++)
    for (int64_t head = 0; head < shape->kv_heads; head++) {
      const int64_t block = slots[i] / shape->block_size, offset = slots[i] % shape->block_size;
      const int64_t at = (i * shape->kv_heads + head) * shape->head_dim;
      qt::kv_store(*shape, shape->tile(pages, block, offset, head), int(offset % qt::TILE),
                   keys + at, values + at);
    }
}
