// The paged cache of keys and values, as attention reads it.
//
// A page is block_size tokens of one KV head, cut into tiles of 16 tokens. In a tile a word of 4
// bytes holds P neighbours: P = 1 float32, 2 bfloat16 or 4 codes of 8 bits.
//
//   tile = [int8 only: float32 key step, key middle, value step, value middle, 16 tokens each]
//          keys    [head_dim / P] [16 tokens]  of P neighbouring channels
//          values  [16 / P]       [head_dim]   of P neighbouring tokens
//
// So 16 keys are one run a channel, and a value's channels are one run a token: neither product has
// to reduce across lanes. An int8 element is middle + step * code, code in [-128, 127], asymmetric, with a step
// and a middle for each token and head; a word has its neighbours in the order 0, 2, 1, 3, so that
// even and odd bytes are pairs of neighbours. What a tile holds beyond its sequence's last token is
// never used, whatever it is.
#pragma once

#include "tile_ops.h"

namespace qt {

enum KvKind : int64_t { KV_FP32 = 0, KV_BF16 = 1, KV_INT8 = 2 };
constexpr int TILE = 16;
constexpr int TILE_VECTORS = TILE / WIDTH;
constexpr int GRID_FLOATS = 4 * TILE;  // in front of an int8 tile
constexpr int MAX_HEAD_DIM = 256;

struct KvShape {  // mirrored by qtool.runtime.kernels.cpu.step.KvShape
  int64_t kind, block_size, kv_heads, head_dim;

  int neighbours() const { return kind == KV_FP32 ? 1 : kind == KV_BF16 ? 2 : 4; }
  size_t tile_bytes() const {
    const size_t grid = kind == KV_INT8 ? GRID_FLOATS * sizeof(float) : 0;
    return grid + size_t(head_dim) * TILE * 8 / neighbours();
  }
  // The tile of a token: `block` from the sequence's table, `offset` within it.
  uint8_t* tile(uint8_t* layer, int64_t block, int64_t offset, int64_t head) const {
    const int64_t tiles = block_size / TILE;
    return layer + ((block * kv_heads + head) * tiles + offset / TILE) * tile_bytes();
  }
};

// Stores one token's key and value, each head_dim floats, at place `lane` of its tile. Not finite
// is what attention makes of an element that is not finite.
void kv_store(const KvShape& shape, uint8_t* tile, int lane, const float* key, const float* value);

// What products make of a stored form. The other factor's rows are items of 4 bytes: a float, or
// two 16-bit integers for two neighbours. A word has PARTS operands, one for each of its items.
template <int KIND>
struct Stored;

struct StoredFloat {
  typedef vf Sum;
  typedef vf Operand;
  static constexpr int PER_ITEM = 1, HEADER = 0;
  static QT_INLINE void add(vf& sum, vf part, vf item) { sum = multiply_add(part, item, sum); }
};

template <>
struct Stored<KV_FP32> : StoredFloat {
  static constexpr int PARTS = 1;
  static QT_INLINE vf part(vu word, int) { return (vf)word; }
};

template <>
struct Stored<KV_BF16> : StoredFloat {
  static constexpr int PARTS = 2;
  static QT_INLINE vf part(vu word, int p) { return (vf)(p ? word & 0xffff0000u : word << 16); }
};

template <>
struct Stored<KV_INT8> {
  typedef vi Sum;
  typedef vu Operand;
  typedef int16_t Halves __attribute__((vector_size(VECTOR_BYTES)));
  static constexpr int PARTS = 2, PER_ITEM = 2, HEADER = GRID_FLOATS * sizeof(float);
  static QT_INLINE vu part(vu word, int p) { return (vu)((Halves)(p ? word : word << 8) >> 8); }
  // Two codes times two integers of 16 bits.
  static QT_INLINE void add(vi& sum, vu codes, vu pair) {
#if defined(QT_AVX512)
    sum = (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)codes, (__m512i)pair);
#elif defined(QT_AVX2)
    sum += (vi)_mm256_madd_epi16((__m256i)codes, (__m256i)pair);
#else
    sum += ((vi)(codes << 16) >> 16) * ((vi)(pair << 16) >> 16) +
           ((vi)codes >> 16) * ((vi)pair >> 16);
#endif
  }
};

}  // namespace qt

QT_API int64_t qt_tile_bytes(const qt::KvShape* shape);
// Keys and values [tokens][kv_heads][head_dim] to slots, for tests.
QT_API void qt_kv_store(const qt::KvShape* shape, uint8_t* pages, const float* keys,
                        const float* values, const int64_t* slots, int64_t tokens);
