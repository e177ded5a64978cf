// Keys and values into pages.
#include "kv_codes.h"
#include "kv_words.h"

namespace qt {
namespace {

uint16_t* halves(uint8_t* p) { return reinterpret_cast<uint16_t*>(p); }

// ---- one token, 16 channels at a time

// Byte of a code of 8 bits: neighbour i of a column, in a row of words. Of e4m3 a vector's words have
// neighbours 0 and 2 of all its columns in front of 1 and 3: halves of a vector become floats.
template <Word WORD>
int code_place(int column, int i) {
  if (WORD == Word::INT8) return column * 4 + byte_of(i);
  return column / WIDTH * VECTOR_BYTES + i % 2 * (VECTOR_BYTES / 2) + column % WIDTH * 2 + i / 2;
}

template <Word WORD>
void put_key_codes(uint8_t* words, int lane, int d, const uint32_t* codes) {
  for (int i = 0; i < LANES; i += 4) {
    uint8_t* to = words + (d + i) / 4 * TILE * 4;
    for (int n = 0; n < 4; n++) to[code_place<WORD>(lane, n)] = uint8_t(codes[i + n]);
  }
}

template <Word WORD>
void put_value_codes(uint8_t* words, int D, int lane, int d, const uint32_t* codes) {
  uint8_t* to = words + lane / 4 * D * 4;
  for (int i = 0; i < LANES; i++) to[code_place<WORD>(d + i, lane % 4)] = uint8_t(codes[i]);
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

template <Word WORD>
u32x16 codes_8bit(f32x16 x, float scale) {
  return WORD == Word::FP8 ? codes_fp8(x, scale) : codes_int8(x, scale);
}

template <Word WORD>
void put_key(uint8_t* words, int lane, const float* key, int D, float scale) {
  each_16(key, D, [&](f32x16 x) { return codes_8bit<WORD>(x, scale); },
          [&](int d, const uint32_t* codes) { put_key_codes<WORD>(words, lane, d, codes); });
}

template <Word WORD>
void put_value(uint8_t* words, int lane, const float* value, int D, float scale) {
  each_16(value, D, [&](f32x16 x) { return codes_8bit<WORD>(x, scale); },
          [&](int d, const uint32_t* codes) { put_value_codes<WORD>(words, D, lane, d, codes); });
}

void store_groups(const KvShape& shape, uint8_t* tile, const PageLayout& at, int lane,
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

void store_key_bytes(const KvShape& shape, uint8_t* tile, const PageLayout& at, int lane,
                     const float* key, const float* fixed) {
  const KvPart part = shape.form().keys;
  const int D = int(shape.head_dim);
  const float scale = put_scale(part, key, D, halves(tile + at.key_grid) + lane, fixed);
  const auto put = part.word == Word::FP8 ? put_key<Word::FP8> : put_key<Word::INT8>;
  put(tile + at.keys, lane, key, D, scale);
}

void store_value_bytes(const KvShape& shape, uint8_t* tile, const PageLayout& at, int lane,
                       const float* value, const float* fixed) {
  const KvPart part = shape.form().values;
  const int D = int(shape.head_dim);
  const float scale = put_scale(part, value, D, halves(tile) + lane, fixed);
  const auto put = part.word == Word::FP8 ? put_value<Word::FP8> : put_value<Word::INT8>;
  put(tile + at.values, lane, value, D, scale);
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

void exact_key(int64_t kind, int D, const uint8_t* tile, int lane, float* out) {
  const auto* floats = reinterpret_cast<const float*>(tile) + lane;
  const auto* x = reinterpret_cast<const uint16_t*>(tile) + lane * 2;
  for (int d = 0; d < D; d++)
    out[d] = kind == KV_FP32 ? floats[d * TILE] : from_bf16(x[d / 2 * TILE * 2 + d % 2]);
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
  const int D = int(shape.head_dim), bytes = shape.tail().layout().tile_bytes;
  alignas(64) float keys[PAGE];
  for (int t = 0; t < PAGE; t += TILE)
    store(keys + t, exact_keys(shape.tail_kind, exact + t / TILE * bytes, d));
  const HalfGrid grid = asymmetric_grid(keys, PAGE);
  halves(page)[d] = grid.scale, halves(page)[D + d] = grid.low;
  const float scale = from_half(grid.scale), low = from_half(grid.low);
  const int shift = 8 * byte_of(d % 4) + d % 8 / 4 * 4;
  for (int t = 0; t < PAGE; t += TILE)
    words[t / TILE] |= codes_int4(loadf(keys + t), scale, low) << shift;
}

void seal_channels(const KvShape& shape, uint8_t* page, const uint8_t* exact) {
  const PageLayout at = shape.layout();
  for (int d = 0; d < int(shape.head_dim); d += 8) {
    u32x16 words[PAGE / TILE] = {};
    for (int i = 0; i < 8; i++) seal_channel(shape, page, exact, d + i, words);
    for (int t = 0; t < PAGE; t += TILE)
      std::memcpy(at.tile(page, t) + at.keys + d / 8 * sizeof *words, words + t / TILE,
                  sizeof *words);
  }
}

// Whether any byte is the code of NaN, whatever its sign.
bool has_unknown(const uint8_t* codes, int bytes) {
  u32x16 found{};
  for (int i = 0; i < bytes; i += 64)
    found |= (load<u32x16>(reinterpret_cast<const float*>(codes + i)) & 0x7f7f7f7fu) + 0x01010101u;
  return fold(found & 0x80808080u, [](auto a, auto b) { return a | b; }) != 0;
}

}  // namespace

void mark_unknown(const PageLayout& at, int head_dim, const uint8_t* tile, float* keys,
                  float* values) {
  if (!has_unknown(tile, at.tile_bytes)) return;
  const auto unknown = [](uint8_t code) { return (code & 0x7f) == 0x7f; };
  for (int token = 0; token < TILE; token++)
    for (int d = 0; d < head_dim; d++) {
      const uint8_t *key = tile + at.keys + d / 4 * TILE * 4;
      const uint8_t *value = tile + at.values + token / 4 * head_dim * 4;
      if (unknown(key[code_place<Word::FP8>(token, d % 4)])) keys[token] = NAN;
      if (unknown(value[code_place<Word::FP8>(d, token % 4)])) values[token] = NAN;
    }
}

void kv_store(const KvLayer& layer, int64_t head, uint8_t* tile, int lane, const float* key,
              const float* value) {
  const KvShape& shape = layer.shape;
  const int D = int(shape.head_dim);
  if (shape.kind == KV_FP32)
    return store_fp32(D, reinterpret_cast<float*>(tile), lane, key, value);
  if (shape.kind == KV_BF16)
    return store_bf16(D, reinterpret_cast<uint16_t*>(tile), lane, key, value);
  const PageLayout at = shape.layout();
  store_key_bytes(shape, tile, at, lane, key, layer.key_scales + head);
  store_value_bytes(shape, tile, at, lane, value, layer.value_scales + head);
}

void kv_seal(const KvShape& shape, uint8_t* page, const uint8_t* exact) {
  const PageLayout at = shape.layout();
  const int D = int(shape.head_dim), bytes = shape.tail().layout().tile_bytes;
  const bool by_channel = shape.form().keys.sharing == Sharing::CHANNEL;
  if (by_channel) seal_channels(shape, page, exact);
  alignas(64) float x[MAX_HEAD_DIM];
  for (int t = 0; t < PAGE; t++) {
    const uint8_t* from = exact + t / TILE * bytes;
    uint8_t* tile = at.tile(page, t);
    exact_value(shape.tail_kind, D, from, t % TILE, x);
    store_groups(shape, tile, at, t % TILE, x);
    if (by_channel) continue;
    exact_key(shape.tail_kind, D, from, t % TILE, x);
    store_key_bytes(shape, tile, at, t % TILE, x, nullptr);
  }
}

}  // namespace qt

int64_t qt_block_bytes(const qt::KvShape* shape) {
  return shape->kv_heads * shape->layout().page_bytes;
}

void qt_kv_store(const qt::KvLayer* layer, const float* keys, const float* values,
                 const int64_t* slots, int64_t tokens) {
  const qt::KvShape& shape = layer->shape;
  const qt::PageLayout places = shape.layout();
  for (int64_t i = 0; i < tokens; i++)
    for (int64_t head = 0; head < shape.kv_heads; head++) {
      const int64_t block = slots[i] / shape.block_size, offset = slots[i] % shape.block_size;
      const int64_t at = (i * shape.kv_heads + head) * shape.head_dim;
      uint8_t* tile = places.tile(places.page(layer->pages, block, head), offset);
      qt::kv_store(*layer, head, tile, int(offset % qt::TILE), keys + at, values + at);
    }
}
