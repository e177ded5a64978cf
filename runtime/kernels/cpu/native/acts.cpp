// Rows of x into the form the tiles read.
#include "gemm.h"
#include "tiles.h"

namespace qt {
namespace {

// Below this a group's values are zero: 127 / magnitude would not be finite.
constexpr float SMALLEST = 1e-30f;

constexpr size_t round_up(size_t bytes) { return (bytes + 63) & ~size_t(63); }

// Where a row lies: its tile's first row, the tile's rows, and its place among them.
struct Place {
  int first, rows, index;
};

Place place_of(const Acts& a, int row) {
  const int in_larger = a.larger_tiles * (a.tile_rows + 1);
  const int tile = row < in_larger ? row / (a.tile_rows + 1)
                                   : a.larger_tiles + (row - in_larger) / a.tile_rows;
  const Range range = row_tile(a, tile);
  return {range.begin, range.end - range.begin, row - range.begin};
}

// The largest magnitude as bits: a NaN is above infinity, infinity above all numbers.
float magnitude(const float* x, int count) {
  u32x16 most = {};
  int i = 0;
  for (; i + LANES <= count; i += LANES) {
    const u32x16 bits = load<u32x16>(x + i) & 0x7fffffffu;
    most = bits > most ? bits : most;
  }
#if defined(QT_AVX512)
  uint32_t result = _mm512_reduce_max_epu32((__m512i)most);
#else
  uint32_t lanes[LANES], result = 0;
  std::memcpy(lanes, &most, sizeof lanes);
  for (uint32_t lane : lanes) result = lane > result ? lane : result;
#endif
  for (; i < count; i++) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    bits &= 0x7fffffffu;
    result = bits > result ? bits : result;
  }
  float value;
  std::memcpy(&value, &result, 4);
  return value;
}

// Values of one group as int8, four neighbours at `to`, the next four `stride` bytes on. Returns
// minus their sum.
QT_INLINE int32_t put_int8(const float* x, int count, float inverse, int8_t* to, int stride) {
  int32_t sum = 0;
  int i = 0;
#if defined(QT_AVX512)
  i32x16 sums = {};
  for (; i + LANES <= count; i += LANES, to += 4 * stride) {
    const i32x16 values = (i32x16)_mm512_cvtps_epi32(loadf(x + i) * inverse);
    sums += values;
    const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)values);
    if (stride == 4) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
      continue;
    }
    int32_t quads[4];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(quads), bytes);
    for (int q = 0; q < 4; q++) std::memcpy(to + q * stride, quads + q, 4);
  }
  sum = _mm512_reduce_add_epi32((__m512i)sums);
#endif
  for (; i < count; i += 4, to += stride) {
    for (int j = 0; j < 4; j++) {
      to[j] = i + j < count ? int8_t(__builtin_lrintf(x[i + j] * inverse)) : int8_t(0);
      sum += to[j];
    }
  }
  return -sum;
}

void put_group_int8(const Acts& a, Place place, const float* x, int count, int group) {
  const size_t at = size_t(place.first) * acts_groups(a) + size_t(group) * place.rows + place.index;
  const float most = magnitude(x, count);
  const int stride = a.by_rows ? 4 : 4 * place.rows;
  int8_t* to = reinterpret_cast<int8_t*>(a.values) + size_t(place.first) * a.padded_k +
               size_t(group) * a.group * place.rows +
               size_t(place.index) * (a.by_rows ? a.group : 4);
  // Not `most <= SMALLEST`, which is false for NaN: its values do not matter, its scale does.
  const float inverse = most > SMALLEST && most <= 3.4e38f ? 127.f / most : 0.f;
  const bool finite = most <= 3.4e38f;
  static const float zeros[MAX_GROUP] = {};
  const float* values = finite ? x : zeros;
  // Twice, so that the compiler knows the one stride.
  const int32_t minus_sum =
      a.by_rows ? put_int8(values, count, inverse, to, 4)
                : put_int8(values, count, inverse, to, stride);
  for (int i = (count + 3) / 4; i < a.group / 4; i++) std::memset(to + i * stride, 0, 4);
  a.scales[at] = finite ? most / 127.f : NAN;
  static_cast<int32_t*>(a.sums)[at] = minus_sum;
}

void put_group_float(const Acts& a, Place place, const float* x, int count, int group) {
  const size_t at = size_t(place.first) * acts_groups(a) + size_t(group) * place.rows + place.index;
  const size_t base = size_t(place.first) * a.padded_k + size_t(group) * a.group * place.rows;
  float sum = 0;
  for (int i = 0; i < a.group; i++) {
    float value = i < count ? x[i] : 0.f;
#if defined(QT_BF16_DOT)
    if (a.compute == BF16) {
      const uint16_t half = to_bf16(value);
      // Pair i % 2 of its quad, first or second of the pair.
      const size_t pair = (size_t(i) / 4 * 2 + i % 2) * place.rows + place.index;
      reinterpret_cast<uint16_t*>(a.values)[base + pair * 2 + i % 4 / 2] = half;
      sum += from_bf16(half);
      continue;
    }
#endif
    if (a.compute == BF16) value = from_bf16(to_bf16(value));
    reinterpret_cast<float*>(a.values)[base + size_t(i) * place.rows + place.index] = value;
    sum += value;
  }
  static_cast<float*>(a.sums)[at] = sum;
}

}  // namespace

static int value_bytes(int compute) {
#if defined(QT_BF16_DOT)
  if (compute == BF16) return 2;
#endif
  return compute == INT8 ? 1 : 4;
}

// The matrix unit reads whole tiles: a row too many where tiles differ by one.
static size_t values_bytes(const Linear& w, int rows) {
  return round_up(size_t(rows) * w.padded_k * value_bytes(w.compute) + MAX_GROUP);
}

size_t acts_bytes(const Linear& w, int rows) {
  const size_t groups = size_t(rows) * (w.padded_k / w.group);
  return values_bytes(w, rows) + 2 * round_up(groups * 4);
}

Acts acts_at(const Linear& w, int rows, void* memory) {
  uint8_t* bytes = static_cast<uint8_t*>(memory);
  uint8_t* scales = bytes + values_bytes(w, rows);
  uint8_t* sums = scales + round_up(size_t(rows) * (w.padded_k / w.group) * 4);
  Acts a = {bytes, reinterpret_cast<float*>(scales), sums,     rows,
            w.k,   w.padded_k,                       w.group, w.compute};
  a.value_bytes = value_bytes(w.compute);
  a.by_rows = matrix_unit_for(w, rows);
  const int most = a.by_rows ? MATRIX_ROWS : TILE_ROWS;
  a.tiles = (rows + most - 1) / most;
  a.tile_rows = rows / a.tiles;
  a.larger_tiles = rows % a.tiles;
  return a;
}

void acts_put_part(const Acts& a, int row, const float* x, int first, int end) {
  const Place place = place_of(a, row);
  for (int group = first; group < end; group++, x += a.group) {
    const int rest = a.k - group * a.group;
    const int count = rest < a.group ? rest : a.group;
    if (a.compute == INT8)
      put_group_int8(a, place, x, count, group);
    else
      put_group_float(a, place, x, count, group);
  }
}

void acts_put(const Acts& a, int row, const float* x, int first, int end) {
  acts_put_part(a, row, x + first * a.group, first, end);
}

}  // namespace qt
