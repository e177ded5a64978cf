// What GEMM tiles are made of, for each instruction set: one vector holds one 4-byte item of WIDTH
// columns. A tile is up to TILE_ROWS rows by tile_vectors(rows) vectors of accumulators, as many as
// there are registers for; a block's 32 columns are one or more tiles side by side. Up to
// MAX_DOUBLED accumulators, counted twice, there are two for each sum, to hide the latency.
#pragma once

#include <cstdint>
#include <cstring>

#include "gemm.h"
#include "vec.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace qt {

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define QT_LEVEL "avx512"
#define QT_AVX512 1
#if defined(__AMX_TILE__) && defined(__AMX_INT8__)
#define QT_AMX 1
#endif
constexpr int WIDTH = 16, TILE_ROWS = 12, MAX_DOUBLED = 16;
constexpr int tile_vectors(int) { return 2; }
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define QT_LEVEL "avx2"
#define QT_AVX2 1
constexpr int WIDTH = 8, TILE_ROWS = 6, MAX_DOUBLED = 4;
constexpr int tile_vectors(int rows) { return rows <= 2 ? 2 : 1; }
#else
#define QT_LEVEL "plain"
constexpr int WIDTH = 4, TILE_ROWS = 6, MAX_DOUBLED = 4;
constexpr int tile_vectors(int) { return 1; }
#endif

static_assert(PANEL_ROWS % TILE_ROWS == 0 && PANEL_ROWS % 16 == 0, "whole tiles of both kinds");
static_assert(BLOCK_COLUMNS % (WIDTH * tile_vectors(1)) == 0, "tiles side by side");

#if defined(QT_AVX512) && defined(__AVX512BF16__)
#define QT_BF16_DOT 1
#endif

// Sanitizers do not see what assembly reads.
#if defined(QT_AVX512) && !defined(__SANITIZE_ADDRESS__)
#define QT_ASSEMBLY 1
#else
#define QT_ASSEMBLY 0
#endif

typedef float vf __attribute__((vector_size(4 * WIDTH)));
typedef int32_t vi __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t vu __attribute__((vector_size(4 * WIDTH)));

constexpr int VECTOR_BYTES = 4 * WIDTH;

template <class V>
static QT_INLINE V load_vector(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
static QT_INLINE void store_vector(float* p, vf v) { __builtin_memcpy(p, &v, sizeof v); }
static QT_INLINE vf spread(float x) { return x - vf{}; }
static QT_INLINE vi spread(int32_t x) { return x - vi{}; }
static QT_INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }

// Stops gcc from repeating a load in every use, and from moving it past another pin.
#if defined(__x86_64__)
template <class V>
static QT_INLINE void pin(V& v) { asm volatile("" : "+v"(v)); }
#else
template <class V>
static QT_INLINE void pin(V&) {}
#endif

// Partial results live in L1 between groups: the registers belong to the accumulators.
static QT_INLINE void keep_in_memory() { asm volatile("" ::: "memory"); }

// ---- a * b + c, scales and zeros

#if defined(QT_AVX512)

static QT_INLINE vf multiply_add(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static QT_INLINE vf load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static QT_INLINE vi load_bytes(const uint8_t* p) {
  return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static QT_INLINE vu load_words(const uint16_t* p) {
  return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

#elif defined(QT_AVX2)

static QT_INLINE vf multiply_add(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static QT_INLINE vf load_half(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static QT_INLINE vi load_bytes(const uint8_t* p) {
  return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
static QT_INLINE vu load_words(const uint16_t* p) {
  return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

#else

static QT_INLINE vf multiply_add(vf a, vf b, vf c) { return a * b + c; }
static QT_INLINE vi load_bytes(const uint8_t* p) {
  vi v;
  for (int i = 0; i < WIDTH; i++) v[i] = p[i];
  return v;
}
static QT_INLINE vu load_words(const uint16_t* p) {
  vu v;
  for (int i = 0; i < WIDTH; i++) v[i] = p[i];
  return v;
}
static QT_INLINE vf load_half(const uint16_t* p) {
  vu half = load_words(p);
  // The 15 bits of exponent and fraction in float's place are the value times 2**-112.
  vf value = (vf)((half & 0x7fffu) << 13) * spread(0x1p112f);
  value = (half & 0x7c00u) == 0x7c00u ? (vf)((half & 0x7fffu) << 13 | 0x7f800000u) : value;
  return (vf)((vu)value | (half & 0x8000u) << 16);
}

#endif

static QT_INLINE vf load_scales(const Linear& w, const uint8_t* scales, int index) {
  switch (w.scale_type) {
    case SCALE_FP16:
      return load_half(reinterpret_cast<const uint16_t*>(scales) + index);
    case SCALE_BF16:
      return (vf)(load_words(reinterpret_cast<const uint16_t*>(scales) + index) << 16);
    default:
      return load_vector<vf>(scales + 4 * index);
  }
}

// sum * (scale * x_scale) + c: how an integer sum of a group enters the result, on every path.
static QT_INLINE vf add_scaled(vi sum, vf scale, float x_scale, vf c) {
  return multiply_add(to_float(sum), scale * spread(x_scale), c);
}

// sum += weights * x, x broadcast.
static QT_INLINE void add_product(vf& sum, vf weights, const float* x) {
#if QT_ASSEMBLY
  // Assembly with the broadcast inside, because gcc 12 hoists broadcasts until it spills sums.
  asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*x));
#else
  sum = multiply_add(weights, spread(*x), sum);
#endif
}

// ---- products of unsigned codes and int8 activations, summed in int32

// 8 neighbours in k of WIDTH columns: `low` has the first four codes in its bytes, `high` the others.
template <int BITS>
static QT_INLINE void load_codes(const uint8_t* steps, int vector, vi& low, vi& high) {
  const uint8_t* p = steps + vector * VECTOR_BYTES;
  vi first = load_vector<vi>(p);
  pin(first);
  if (BITS == 4) {
    low = first & 0x0f0f0f0f;
    high = (vi)((vu)first >> 4) & 0x0f0f0f0f;
  } else {
    low = first;
    high = load_vector<vi>(p + STEP_BYTES);
    pin(high);
  }
}

#if defined(QT_AVX512)

// Assembly for the same reason as in add_product.
static QT_INLINE void dot4(vi& sum, vi codes, const int8_t* x) {
#if QT_ASSEMBLY
  asm("vpdpbusd %2%{1to16%}, %1, %0"
      : "+v"(sum) : "v"(codes), "m"(*reinterpret_cast<const int8_t(*)[4]>(x)));
#else
  int32_t word;
  std::memcpy(&word, x, 4);
  sum = (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(word));
#endif
}
template <int BITS>
static QT_INLINE void dot8(vi& sum, vi& sum_of_high, vi low, vi high, const int8_t* x, int stride) {
  dot4(sum, low, x);
  dot4(sum_of_high, high, x + stride);
}
// zeros are below 2**15 and minus_sum in int16 (MAX_GROUP sees to it).
static QT_INLINE vi subtract_zeros(vi sum, vi zeros, int32_t minus_sum) {
  return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)zeros, _mm512_set1_epi32(minus_sum));
}
constexpr int ZERO_OF_8_BITS = 128;

#elif defined(QT_AVX2)

static QT_INLINE vi sum_pairs(__m256i pairs) {
  return (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
static QT_INLINE __m256i broadcast4(const int8_t* x) {
  int32_t word;
  std::memcpy(&word, x, 4);
  return _mm256_set1_epi32(word);
}
// vpmaddubsw adds two products in 16 bits and saturates. 4 bits: 15 * 127 * 4 fits. 8 bits: as
// |code - 128| times the value with that code's sign, 128 * 127 * 2 fits.
template <int BITS>
static QT_INLINE void dot8(vi& sum, vi& sum_of_high, vi low, vi high, const int8_t* x, int stride) {
  const __m256i a = broadcast4(x), b = broadcast4(x + stride);
  if (BITS == 4) {
    const __m256i c = _mm256_maddubs_epi16((__m256i)low, a);
    const __m256i d = _mm256_maddubs_epi16((__m256i)high, b);
    sum += sum_pairs(_mm256_add_epi16(c, d));
  } else {
    const __m256i offset = _mm256_set1_epi8(-128);
    const __m256i c = _mm256_xor_si256((__m256i)low, offset);
    const __m256i d = _mm256_xor_si256((__m256i)high, offset);
    sum += sum_pairs(_mm256_maddubs_epi16(_mm256_abs_epi8(c), _mm256_sign_epi8(a, c)));
    sum_of_high += sum_pairs(_mm256_maddubs_epi16(_mm256_abs_epi8(d), _mm256_sign_epi8(b, d)));
  }
}
static QT_INLINE vi subtract_zeros(vi sum, vi zeros, int32_t minus_sum) {
  return sum + (vi)_mm256_madd_epi16((__m256i)zeros, _mm256_set1_epi32(minus_sum));
}
constexpr int ZERO_OF_8_BITS = 0;  // taken off before the product

#else

template <int BITS>
static QT_INLINE void dot8(vi& sum, vi& sum_of_high, vi low, vi high, const int8_t* x, int stride) {
  for (int j = 0; j < 4; j++) {
    sum += (vi)((vu)low >> (8 * j) & 255u) * int32_t(x[j]);
    sum_of_high += (vi)((vu)high >> (8 * j) & 255u) * int32_t(x[stride + j]);
  }
}
static QT_INLINE vi subtract_zeros(vi sum, vi zeros, int32_t minus_sum) {
  return sum + zeros * minus_sum;
}
constexpr int ZERO_OF_8_BITS = 128;

#endif

}  // namespace qt
