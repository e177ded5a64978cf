// Keys and values into pages.
#include "kv_pages.h"

#include "kv_codes.h"

namespace qt {
namespace {

uint16_t* halves(uint8_t* p) { return reinterpret_cast<uint16_t*>(p); }

// ---- one token, 16 channels at a time

// Codes of 8 bits into words of 4 neighbouring channels.
void put_key_codes(uint8_t* words, int lane, int d, const uint32_t* codes) {
  for (int i = 0; i < LANES; i += 4) {
    const uint32_t word = codes[i] | codes[i + 2] << 8 | codes[i + 1] << 16 | codes[i + 3] << 24;
    std::memcpy(words + ((d + i) / 4 * TILE + lane) * 4, &word, sizeof word);
  }
}

void put_value_codes(uint8_t* words, int D, int lane, int d, const uint32_t* codes) {
  uint8_t* to = words + (lane / 4 * D + d) * 4 + byte_of(lane % 4);
  for (int i = 0; i < LANES; i++) to[i * 4] = uint8_t(codes[i]);
}

void put_value_nibbles(uint8_t* words, int D, int lane, int d, const uint32_t* codes) {
  uint8_t* to = words + (lane / 8 * D + d) * 4 + byte_of(lane % 4);
  const int shift = lane % 8 / 4 * 4, other = 0xf0 >> shift;
  for (int i = 0; i < LANES; i++) to[i * 4] = uint8_t((to[i * 4] & other) | codes[i] << shift);
}

// put(d, codes) of n channels.
template <class Codes, class Put>
void each_16(const float* x, int n, Codes codes_of, Put put) {
  for (int d = 0; d < n; d += LANES) {
    const u32x16 made = codes_of(loadf(x + d));
    uint32_t codes[LANES];
    std::memcpy(codes, &made, sizeof codes);
    put(d, codes);
  }
}

// 8 bits: the scale that a token and head has in the tile, or the layer's.
float put_scale(const KvPart& part, const float* x, int D, uint16_t* scale, const float* fixed) {
  if (part.sharing == Sharing::LAYER) return *fixed;
  *scale = symmetric_scale(x, D, part.word == Word::FP8 ? FP8_TOP : INT8_TOP);
  return from_half(*scale);
}

template <class Put>
void put_8bit(const KvPart& part, const float* x, int D, float scale, Put put) {
  if (part.word == Word::FP8)
    each_16(x, D, [&](f32x16 v) { return codes_fp8(v, scale); }, put);
  else
    each_16(x, D, [&](f32x16 v) { return codes_int8(v, scale); }, put);
}

void store_groups(const KvShape& shape, uint8_t* tile, const TileLayout& at, int lane,
                  const float* value) {
  const int width = shape.group();
  for (int g = 0; g < shape.groups(); g++) {
    const float* x = value + g * width;
    const HalfGrid grid = asymmetric_grid(x, width);
    uint16_t* to = halves(tile) + g * 2 * TILE + lane;
    to[0] = grid.scale, to[TILE] = grid.low;
    const float scale = from_half(grid.scale), low = from_half(grid.low);
    each_16(x, width, [&](f32x16 v) { return codes_int4(v, scale, low); },
            [&](int d, const uint32_t* codes) {
              put_value_nibbles(tile + at.values, int(shape.head_dim), lane, g * width + d, codes);
            });
  }
}

void store_codes(const KvLayer& layer, int64_t head, uint8_t* tile, int lane, const float* key,
                 const float* value) {
  const KvShape& shape = layer.shape;
  const KvForm form = shape.form();
  const TileLayout at = shape.layout();
  const int D = int(shape.head_dim);
  float scale = put_scale(form.keys, key, D, halves(tile + at.key_grid) + lane,
                          layer.key_scales + head);
  put_8bit(form.keys, key, D, scale, [&](int d, const uint32_t* codes) {
    put_key_codes(tile + at.keys, lane, d, codes);
  });
  if (form.values.sharing == Sharing::GROUP) return store_groups(shape, tile, at, lane, value);
  scale = put_scale(form.values, value, D, halves(tile) + lane, layer.value_scales + head);
  put_8bit(form.values, value, D, scale, [&](int d, const uint32_t* codes) {
    put_value_codes(tile + at.values, D, lane, d, codes);
  });
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

// ---- whole pages

// Channel d of a tile's 16 keys as they were computed.
f32x16 exact_keys(int64_t kind, const uint8_t* tile, int d) {
  if (kind == KV_FP32) return loadf(reinterpret_cast<const float*>(tile) + d * TILE);
  const u32x16 words = load<u32x16>(reinterpret_cast<const float*>(tile) + d / 2 * TILE);
  return (f32x16)(d % 2 ? words & 0xffff0000u : words << 16);
}

void exact_value(int64_t kind, int D, const uint8_t* tile, int lane, float* out) {
  if (kind == KV_FP32) {
    std::memcpy(out, reinterpret_cast<const float*>(tile) + (TILE + lane) * D, D * sizeof *out);
    return;
  }
  const uint16_t* x = reinterpret_cast<const uint16_t*>(tile) + (TILE + lane / 2 * 2) * D + lane % 2;
  for (int d = 0; d < D; d++) out[d] = from_bf16(x[d * 2]);
}

// One channel of a page's keys: its grid, and its nibble in the words of each tile.
void seal_channel(const KvShape& shape, uint8_t* page, const uint8_t* exact, int d,
                  u32x16 (&words)[PAGE / TILE]) {
  const KvShape tail = shape.tail();
  const int D = int(shape.head_dim), bytes = tail.layout().bytes;
  alignas(64) float keys[PAGE];
  for (int t = 0; t < PAGE; t += TILE)
    store(keys + t, exact_keys(tail.kind, exact + t / TILE * bytes, d));
  const HalfGrid grid = asymmetric_grid(keys, PAGE);
  halves(page)[d] = grid.scale, halves(page)[D + d] = grid.low;
  const float scale = from_half(grid.scale), low = from_half(grid.low);
  const int shift = 8 * byte_of(d % 4) + d % 8 / 4 * 4;
  for (int t = 0; t < PAGE; t += TILE)
    words[t / TILE] |= codes_int4(loadf(keys + t), scale, low) << shift;
}

}  // namespace

void kv_store(const KvLayer& layer, int64_t head, uint8_t* tile, int lane, const float* key,
              const float* value) {
  const int D = int(layer.shape.head_dim);
  if (layer.shape.kind == KV_FP32)
    store_fp32(D, reinterpret_cast<float*>(tile), lane, key, value);
  else if (layer.shape.kind == KV_BF16)
    store_bf16(D, reinterpret_cast<uint16_t*>(tile), lane, key, value);
  else
    store_codes(layer, head, tile, lane, key, value);
}

void kv_seal(const KvShape& shape, uint8_t* page, const uint8_t* exact) {
  const KvShape tail = shape.tail();
  const TileLayout at = shape.layout();
  const int D = int(shape.head_dim), bytes = tail.layout().bytes;
  for (int d = 0; d < D; d += 8) {
    u32x16 words[PAGE / TILE] = {};
    for (int i = 0; i < 8; i++) seal_channel(shape, page, exact, d + i, words);
    for (int t = 0; t < PAGE; t += TILE)
      std::memcpy(shape.tile(page, t) + at.keys + d / 8 * sizeof *words, words + t / TILE,
                  sizeof *words);
  }
  alignas(64) float value[MAX_HEAD_DIM];
  for (int t = 0; t < PAGE; t++) {
    exact_value(tail.kind, D, exact + t / TILE * bytes, t % TILE, value);
    store_groups(shape, shape.tile(page, t), at, t % TILE, value);
  }
}

}  // namespace qt

int64_t qt_block_bytes(const qt::KvShape* shape) {
  return int64_t(shape->kv_heads * shape->page_bytes());
}

void qt_kv_store(const qt::KvLayer* layer, const float* keys, const float* values,
                 const int64_t* slots, int64_t tokens) {
  const qt::KvShape& shape = layer->shape;
  for (int64_t i = 0; i < tokens; i++)
    for (int64_t head = 0; head < shape.kv_heads; head++) {
      const int64_t block = slots[i] / shape.block_size, offset = slots[i] % shape.block_size;
      const int64_t at = (i * shape.kv_heads + head) * shape.head_dim;
      uint8_t* tile = shape.tile(shape.page(layer->pages, block, head), offset);
      qt::kv_store(*layer, head, tile, int(offset % qt::TILE), keys + at, values + at);
    }
}
