#pragma once
// 16 floats at a time in one source for every instruction set: gcc and clang lower 64-byte vectors
// to one AVX-512 register, two AVX2 registers, or what the target has. A sum keeps its order on all
// of them; only where a multiply and an add become one instruction the last bit may differ.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512DQ__)
#include <immintrin.h>
#endif

namespace qt {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));

constexpr int LANES = 16;
constexpr float NEVER = -INFINITY;  // the score of a key that must not be seen

// Accumulator arrays stay in registers only where every loop over them is unrolled (gcc 12).
#define QT_UNROLL _Pragma("GCC unroll 32")
#define QT_NOINLINE __attribute__((noinline))
#define QT_INLINE inline __attribute__((always_inline))

template <class Vector, class Element>
static QT_INLINE Vector load(const Element* p) {
  static_assert(sizeof(Element) == 4, "16 lanes of 4 bytes");
  Vector v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
static QT_INLINE f32x16 loadf(const float* p) { return load<f32x16>(p); }
static QT_INLINE void store(float* p, f32x16 v) { __builtin_memcpy(p, &v, sizeof v); }
static QT_INLINE f32x16 all(float x) { return x - f32x16{}; }
static QT_INLINE i32x16 lane_numbers() {
  return i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
}
template <class F>
static QT_INLINE F max(F a, F b) { return a > b ? a : b; }
#if defined(__AVX512DQ__)
// The same in one instruction, where gcc 12 takes a comparison and a blend.
static QT_INLINE f32x16 max(f32x16 a, f32x16 b) { return _mm512_max_ps(a, b); }
#endif
static QT_INLINE f32x16 abs(f32x16 a) { return (f32x16)((u32x16)a & 0x7fffffffu); }

// Halves onto halves: always the same tree, so that a sum has the same bits everywhere.
template <class F, class Join>
static QT_INLINE auto fold(F v, Join join) {
  if constexpr (sizeof v == 2 * sizeof v[0]) {
    return join(v[0], v[1]);
  } else {
    typedef typename std::remove_reference<decltype(v[0])>::type Element;
    typedef Element Half __attribute__((vector_size(sizeof v / 2)));
    Half low, high;
#if defined(__AVX512DQ__)
    if constexpr (sizeof v == 64) {  // gcc 12 takes a way through memory
      low = (Half)_mm512_castps512_ps256((__m512)v);
      high = (Half)_mm512_extractf32x8_ps((__m512)v, 1);
      return fold(join(low, high), join);
    }
#endif
    __builtin_memcpy(&low, &v, sizeof low);
    __builtin_memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof low, sizeof high);
    return fold(join(low, high), join);
  }
}
template <class F>
static QT_INLINE auto sum(F v) {
  return fold(v, [](auto a, auto b) { return a + b; });
}
template <class F>
static QT_INLINE auto highest(F v) {
  return fold(v, [](auto a, auto b) { return a > b ? a : b; });
}

// e**x for x <= 88 with a relative error of 3e-7: Cody and Waite's reduction (1980, chapter 6) and
// 1 + r + r**2 q(r) on half a binade, q of degree 3 with the smallest relative error (1.6e-7). Below
// -87 it is 2**-126 or so, never denormal.
template <class F>
static QT_INLINE F exp(F x) {
  typedef decltype(x < x) Integers;
  x = max(F{} - 87.f, x);  // NaN stays NaN
  // 1.5 * 2**23 + 127: adding it leaves the biased exponent in the low bits.
  const float round = 12583039.f;
  F shifted = x * 1.44269504f + round;
  F n = shifted - round;
  F r = x - n * 0.693145752f - n * 1.42860677e-6f;
  F p = r * 0.00831243116f + 0.04189099f;
  p = p * r + 0.166671187f;
  p = p * r + 0.499992251f;
  p = p * r + 1.f;
  p = p * r + 1.f;
  return p * (F)((Integers)shifted << 23);
}
static QT_INLINE f32x16 silu(f32x16 x) { 
  return x / (1.f + exp(x < -88.f ? all(88.f) : -x));
}

// bfloat16 in the upper half of 4 bytes, rounded to nearest, ties to even.
static QT_INLINE uint16_t to_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return uint16_t(u >> 16 | 0x40);  // NaN: rounding might wrap
  return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
static QT_INLINE float from_bf16(uint16_t x) {
  uint32_t u = uint32_t(x) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// float16, rounded to nearest, ties to even.
static QT_INLINE uint16_t to_half(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  const uint32_t sign = u >> 16 & 0x8000u;
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return uint16_t(sign | 0x7e00u);
  if (u >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // 65520 and more
  if (u >= 0x38800000u)                                   // 2**-14: normal
    return uint16_t(sign | (u - 0x38000000u + 0xfffu + (u >> 13 & 1u)) >> 13);
  // Halves are 2**-24 apart here, as floats from 0.5 on are: 0.5 + x has the half's bits below.
  const float shifted = std::fabs(x) + 0.5f;
  std::memcpy(&u, &shifted, 4);
  return uint16_t(sign | (u - 0x3f000000u));
}
static QT_INLINE float from_half(uint16_t x) {
  const uint32_t exponent = x & 0x7c00u;
  uint32_t u = uint32_t(x & 0x7fffu) << 13;
  if (exponent == 0x7c00u) u |= 0x7f800000u;
  float f;
  std::memcpy(&f, &u, 4);
  // With float's bias the bits are the value times 2**-112.
  if (exponent != 0x7c00u) f *= 0x1p112f;
  return x & 0x8000u ? -f : f;
}

}  // namespace qt
