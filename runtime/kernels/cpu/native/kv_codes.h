// Codes of keys and values, bit for bit those of runtime/kv_codes.py: a grid is rounded to float16
// before codes are computed. Lengths are multiples of 16.
#pragma once

#include "vec.h"

namespace qt {

constexpr float INT8_TOP = 127.f, FP8_TOP = 448.f;
constexpr float CODES_4BIT = 15.f;

// float16 scale and minimum.
struct HalfGrid {
  uint16_t scale, low;
};

// A scale for `x`: its largest magnitude becomes `top`. NaN if an element is.
uint16_t symmetric_scale(const float* x, int n, float top);
// Scale and minimum of what lies between two floats.
HalfGrid asymmetric_grid(float low, float high);
// The same of `x`. NaN if an element is.
HalfGrid asymmetric_grid(const float* x, int n);

// Nearest integer, ties to even, in the lowest bits: adding 1.5 * 2**23 rounds.
static QT_INLINE u32x16 nearest(f32x16 x) { return (u32x16)(x + 12582912.f); }

// 16 codes in the lowest bits; of NaN it is some code.
static QT_INLINE u32x16 codes_int8(f32x16 x, float scale) {
  const f32x16 scaled = x / scale;
  const f32x16 cut = scaled > INT8_TOP ? all(INT8_TOP) : scaled > -INT8_TOP ? scaled : all(-INT8_TOP);
  return nearest(cut) & 255u;
}
static QT_INLINE u32x16 codes_int4(f32x16 x, float scale, float low) {
  const f32x16 scaled = (x - low) / scale;
  const f32x16 cut = scaled > CODES_4BIT ? all(CODES_4BIT) : scaled > 0.f ? scaled : f32x16{};
  return nearest(cut) & 15u;
}
// e4m3fn; of NaN it is 0x7f.
static QT_INLINE u32x16 codes_fp8(f32x16 x, float scale) {
  const f32x16 scaled = x / scale, size = abs(scaled);
  const u32x16 cut = (u32x16)(size > FP8_TOP ? all(FP8_TOP) : size);
  // From exponent bias 127 to 7, rounded to nearest, ties to even, at the third bit of the fraction.
  const u32x16 normal = (cut + 0x7ffffu + (cut >> 20 & 1u) - (120u << 23)) >> 20;
  // Below 2**-6 codes are 2**-9 apart, as floats from 2**14 on are.
  const u32x16 small = (u32x16)((f32x16)cut + 16384.f) & 255u;
  const u32x16 code = (f32x16)cut < 0.015625f ? small : normal;
  const u32x16 known = scaled == scaled ? code : u32x16{} + 0x7fu;
  return known | ((u32x16)scaled >> 24 & 0x80u);
}

}  // namespace qt
