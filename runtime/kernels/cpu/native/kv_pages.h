#pragma once
// The paged cache of keys and values, as attention reads it.
//
// A page is block_size tokens of one KV head, cut into tiles of 16 tokens. In a tile, 4 bytes hold
// P neighbours: P = 1 float32, 2 bfloat16 or 4 uint8.
//
//   tile = [int8 only: float32 key step, key minimum, value step, value minimum, 16 tokens each]
//          keys    [head_dim / P] [16 tokens]  of P neighbouring channels
//          values  [16 / P]       [head_dim]   of P neighbouring tokens
//
// So 16 keys are one vector a channel, and 16 channels of a value are one vector a token: neither
// product has to reduce across lanes. An int8 element is minimum + step * code (asymmetric, a step
// and a minimum for each token and head). What a tile holds beyond its sequence's last token is
// never used, whatever it is.
#include "vec.h"

namespace qt {

enum KvKind : int64_t { KV_FP32 = 0, KV_BF16 = 1, KV_INT8 = 2 };
constexpr int TILE = LANES;
constexpr int STEPS = 4 * TILE;  // floats in front of an int8 tile

struct KvShape {  // mirrored by qtool.runtime.kernels.cpu.step.KvShape
  int64_t kind, block_size, kv_heads, head_dim;

  int pack() const { return kind == KV_FP32 ? 1 : kind == KV_BF16 ? 2 : 4; }
  size_t tile_bytes() const {
    return (kind == KV_INT8 ? STEPS * sizeof(float) : 0) + size_t(head_dim) * TILE * 8 / pack();
  }
  // The tile of a token: `block` from the sequence's table, `offset` within it.
  uint8_t* tile(uint8_t* layer, int64_t block, int64_t offset, int64_t head) const {
    const int64_t tiles = block_size / TILE;
    return layer + ((block * kv_heads + head) * tiles + offset / TILE) * tile_bytes();
  }
};

// One stored form: how 4 bytes become P floats.
template <int KIND>
struct Stored;
template <>
struct Stored<KV_FP32> {
  static constexpr int P = 1, HEADER = 0;
  static QT_INLINE f32x16 part(u32x16 word, int) { return (f32x16)word; }
};
template <>
struct Stored<KV_BF16> {
  static constexpr int P = 2, HEADER = 0;
  static QT_INLINE f32x16 part(u32x16 word, int p) {
    return (f32x16)(p ? word & 0xffff0000u : word << 16);
  }
};
template <>
struct Stored<KV_INT8> {
  static constexpr int P = 4, HEADER = STEPS;
  static QT_INLINE f32x16 part(u32x16 word, int p) {
    return __builtin_convertvector((i32x16)(word >> (8 * p) & 255u), f32x16);
  }
};

struct Grid {
  float step, minimum;
};
static inline Grid int8_grid(const float* x, int n) {
  f32x16 low = loadf(x), high = low;
  for (int i = LANES; i < n; i += LANES) {
    high = max(high, loadf(x + i));
    low = -max(-low, -loadf(x + i));
  }
  const float minimum = -highest(-low);
  return {(highest(high) - minimum) * (1.f / 255), minimum};
}
// 16 codes, rounded to nearest, ties to even, by adding 1.5 * 2**23; NaN becomes some code, and shows
// in the grid.
static inline void int8_codes(const float* x, Grid grid, float inverse, uint32_t* codes) {
  const f32x16 scaled = (loadf(x) - grid.minimum) * inverse;
  const f32x16 cut = scaled > 255.f ? all(255.f) : scaled > 0.f ? scaled : f32x16{};
  const u32x16 rounded = (u32x16)(cut + 12582912.f) - 0x4b400000u;
  std::memcpy(codes, &rounded, sizeof rounded);
}

// Stores one token's key and value, each head_dim floats, at place `offset` % 16 of its tile.
static inline void kv_store(const KvShape& shape, uint8_t* tile, int lane, const float* key,
                            const float* value) {
  const int D = int(shape.head_dim), P = shape.pack();
  if (shape.kind == KV_FP32) {
    float *k = (float*)tile, *v = k + D * TILE;
    for (int d = 0; d < D; d++) k[d * TILE + lane] = key[d];
    std::memcpy(v + lane * D, value, D * sizeof(float));
    return;
  }
  const int at = lane / P * D * P + lane % P;  // of channel 0 of the value
  if (shape.kind == KV_BF16) {
    uint16_t *k = (uint16_t*)tile, *v = k + D * TILE;
    for (int d = 0; d < D; d++) k[d / P * TILE * P + lane * P + d % P] = to_bf16(key[d]);
    for (int d = 0; d < D; d++) v[at + d * P] = to_bf16(value[d]);
    return;
  }
  float* steps = (float*)tile;
  uint8_t *k = tile + STEPS * sizeof(float), *v = k + D * TILE;
  const Grid kg = int8_grid(key, D), vg = int8_grid(value, D);
  const float ki = kg.step > 0 ? 1 / kg.step : 0, vi = vg.step > 0 ? 1 / vg.step : 0;
  steps[lane] = kg.step, steps[TILE + lane] = kg.minimum;
  steps[2 * TILE + lane] = vg.step, steps[3 * TILE + lane] = vg.minimum;
  for (int d = 0; d < D; d += LANES) {
    uint32_t codes[LANES];
    int8_codes(key + d, kg, ki, codes);
    for (int q = 0; q < LANES; q += P) {
      const uint32_t word = codes[q] | codes[q + 1] << 8 | codes[q + 2] << 16 | codes[q + 3] << 24;
      std::memcpy(k + ((d + q) / P * TILE + lane) * P, &word, sizeof word);
    }
    int8_codes(value + d, vg, vi, codes);
    for (int i = 0; i < LANES; i++) v[at + (d + i) * P] = uint8_t(codes[i]);
  }
}

}  // namespace qt
