// The paged cache of keys and values: what is stored, and where.
//
// A page is block_size tokens of one KV head, cut into tiles of 16 tokens. In a tile a word of 4
// bytes holds P neighbours: 1 float32, 2 bfloat16, 4 codes of 8 bits, or 8 of 4 bits.
//
//   page = [keys by channel only: float16 scales [head_dim], minima [head_dim]]
//          tiles
//   tile = [grid of values: a head: float16 scales [16 tokens];
//                           a group: float16 [groups] [scales, minima] [16 tokens]]
//          [grid of keys:   a head: float16 scales [16 tokens]]
//          keys    [head_dim / P] [16 tokens]  of P neighbouring channels
//          values  [16 / P]       [head_dim]   of P neighbouring tokens
//
// So 16 keys are one run a channel, and a value's channels are one run a token: neither product has
// to reduce across lanes. Codes, grids and sizes are those of runtime/kv_codes.py and
// runtime/kv_schemes.py. What a page holds beyond its sequence's last token is never used, whatever
// it is.
//
// What has codes of 4 bits is stored in whole pages of PAGE tokens. Until a page is full its tokens
// lie, as they were computed, in a tail page: PAGE tokens of every KV head, in the form of tail_kind.
#pragma once

#include <cstddef>

#include "pool.h"
#include "vec.h"

namespace qt {

enum KvKind : int64_t {  // mirrored by KINDS of qtool.runtime.kernels.cpu.kv_pages
  KV_FP32, KV_BF16, KV_INT8, KV_FP8, KV_FP8_STATIC, KV_K8V4, KV_INT4
};

enum class Word { FP32, BF16, INT8, FP8, INT4 };

// What shares a scale: nothing has one; a head of the layer; a token of a head; GROUP channels of a
// token and head; a channel of a page and head.
enum class Sharing { NOTHING, LAYER, HEAD, GROUP, CHANNEL };

struct KvPart {
  Word word;
  Sharing sharing;
};
struct KvForm {
  KvPart keys, values;

  constexpr bool has_tails() const { return keys.word == Word::INT4 || values.word == Word::INT4; }
};

constexpr KvForm kv_form(int64_t kind) {
  constexpr KvPart fp32 = {Word::FP32, Sharing::NOTHING}, bf16 = {Word::BF16, Sharing::NOTHING};
  constexpr KvPart int8 = {Word::INT8, Sharing::HEAD}, fp8 = {Word::FP8, Sharing::HEAD};
  constexpr KvPart fixed = {Word::FP8, Sharing::LAYER}, groups = {Word::INT4, Sharing::GROUP};
  constexpr KvPart channels = {Word::INT4, Sharing::CHANNEL};
  switch (kind) {
    case KV_FP32: return {fp32, fp32};
    case KV_BF16: return {bf16, bf16};
    case KV_INT8: return {int8, int8};
    case KV_FP8: return {fp8, fp8};
    case KV_FP8_STATIC: return {fixed, fixed};
    case KV_K8V4: return {int8, groups};
    default: return {channels, groups};
  }
}

// P of the drawing.
constexpr int neighbours(Word word) {
  return word == Word::FP32 ? 1 : word == Word::BF16 ? 2 : word == Word::INT4 ? 8 : 4;
}
// Where neighbour i of a word of integer codes lies: even and odd bytes are pairs of neighbours. Of
// 4-bit codes neighbours 4 to 7 lie above neighbours 0 to 3.
constexpr int byte_of(int i) { return i == 1 ? 2 : i == 2 ? 1 : i; }

constexpr int TILE = 16, PAGE = 64, GROUP = 64;
constexpr int MAX_HEAD_DIM = 256, MAX_GROUPS = MAX_HEAD_DIM / GROUP;
constexpr int HALF = 2;  // bytes of a scale or minimum

// Where things lie, in bytes: in a tile, in a page.
struct PageLayout {
  int key_grid, keys, values, tile_bytes;
  int tiles;  // behind the grid of the page
  int64_t page_bytes, kv_heads;

  // The page of a block and KV head, and in it the tile of token `offset`.
  uint8_t* page(uint8_t* pages, int64_t block, int64_t head) const {
    return pages + (block * kv_heads + head) * page_bytes;
  }
  uint8_t* tile(uint8_t* page, int64_t offset) const {
    return page + tiles + offset / TILE * tile_bytes;
  }
};

struct KvShape {  // mirrored by qtool.runtime.kernels.cpu.kv_pages.KvShape
  int64_t kind, tail_kind, block_size, kv_heads, head_dim;

  KvForm form() const { return kv_form(kind); }
  // Of its tail pages.
  KvShape tail() const { return {tail_kind, tail_kind, PAGE, kv_heads, head_dim}; }
  // Channels that share a scale of GROUP, and how many times.
  int group() const { return head_dim % GROUP ? int(head_dim) : GROUP; }
  int groups() const { return int(head_dim) / group(); }

  PageLayout layout() const {
    const KvForm f = form();
    const int a_scale = TILE * HALF, word_bytes = int(head_dim) * TILE * 4;
    PageLayout l;
    l.key_grid = f.values.sharing == Sharing::HEAD ? a_scale
                 : f.values.sharing == Sharing::GROUP ? 2 * a_scale * groups() : 0;
    l.keys = l.key_grid + (f.keys.sharing == Sharing::HEAD ? a_scale : 0);
    l.values = l.keys + word_bytes / neighbours(f.keys.word);
    l.tile_bytes = l.values + word_bytes / neighbours(f.values.word);
    l.tiles = f.keys.sharing == Sharing::CHANNEL ? 2 * int(head_dim) * HALF : 0;
    l.page_bytes = l.tiles + block_size / TILE * l.tile_bytes;
    l.kv_heads = kv_heads;
    return l;
  }
};

// One layer's part of the cache.
struct KvLayer {  // mirrored by qtool.runtime.kernels.cpu.kv_pages.KvLayer
  KvShape shape;
  uint8_t* pages;
  uint8_t* tails;  // tail pages, tail_stride bytes apart; or null
  int64_t tail_stride;
  const float *key_scales, *value_scales;  // [kv_heads], where the layer's heads have one
  int64_t group;  // whose block tables name its pages
};

// Stores one token's key and value, each head_dim floats, at place `lane` of its tile; not of a
// form with tail pages. A key or value with a NaN is one of NaNs.
void kv_store(const KvLayer& layer, int64_t head, uint8_t* tile, int lane, const float* key,
              const float* value);

// Of a tile of e4m3 whose scales are the layer's: NaN in `keys` or `values` [16 tokens] where a
// token's key or value has the code of one. Products take it for a number.
void mark_unknown(const PageLayout& at, int head_dim, const uint8_t* tile, float* keys,
                  float* values);

// Stores a whole page of one KV head, of which `exact` is the page as it was computed.
void kv_seal(const KvShape& shape, uint8_t* page, const uint8_t* exact);

}  // namespace qt

// Bytes of one layer's block, all KV heads.
QT_API int64_t qt_block_bytes(const qt::KvShape* shape);
// Keys and values [tokens][kv_heads][head_dim] to slots, for tests.
QT_API void qt_kv_store(const qt::KvLayer* layer, const float* keys, const float* values,
                        const int64_t* slots, int64_t tokens);
