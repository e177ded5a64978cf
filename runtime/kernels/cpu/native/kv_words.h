// What products make of stored words, a vector of them at a time. The other factor's rows are items of
// 4 bytes: a float, or two 16-bit integers for two neighbours. A word has PARTS operands, one for each
// of its items.
#pragma once

#include "kv_pages.h"
#include "tile_ops.h"

namespace qt {

constexpr int TILE_VECTORS = TILE / WIDTH;

template <Word WORD>
struct Operands;

// FINITE: whatever a word holds is a number, so that an item of 0 hides it. Values are UNIT ** 2
// times the operands.
struct FloatOperands {
  typedef vf Sum;
  typedef vf Operand;
  static constexpr int PER_ITEM = 1;
  static constexpr bool FINITE = false, INTEGERS = false;
  static constexpr float UNIT = 1;
  static QT_INLINE void add(vf& sum, vf part, vf item) { sum = multiply_add(part, item, sum); }
};

template <>
struct Operands<Word::FP32> : FloatOperands {
  static constexpr int PARTS = 1;
  static QT_INLINE vf part(const uint8_t* words, int) { return load_vector<vf>(words); }
};

template <>
struct Operands<Word::BF16> : FloatOperands {
  static constexpr int PARTS = 2;
  static QT_INLINE vf part(const uint8_t* words, int p) {
    const vu word = load_vector<vu>(words);
    return (vf)(p ? word & 0xffff0000u : word << 16);
  }
};

// A code's bits after its sign are those of a float16 2**8 times too small, also where it is not
// normal. (Those of a float32 2**120 times too small would be made in fewer operations, but a product
// with one that is not normal takes 160 cycles.) The codes of NaN become 480.
template <>
struct Operands<Word::FP8> : FloatOperands {
  static constexpr int PARTS = 4;
  static constexpr bool FINITE = true;
  static constexpr float UNIT = 16;
  static QT_INLINE vf part(const uint8_t* words, int p) {
    const uint8_t* half = words + p % 2 * (VECTOR_BYTES / 2);
#if defined(QT_AVX512)
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(half));
    const __m256i top = p / 2 ? codes : _mm256_slli_epi16(codes, 8);
    const __m256i bits = _mm256_and_si256(_mm256_srai_epi16(top, 1), _mm256_set1_epi16(-0x4080));
    return _mm512_cvtph_ps(bits);
#elif defined(QT_AVX2)
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(half));
    const __m128i top = p / 2 ? codes : _mm_slli_epi16(codes, 8);
    const __m128i bits = _mm_and_si128(_mm_srai_epi16(top, 1), _mm_set1_epi16(-0x4080));
    return _mm256_cvtph_ps(bits);
#else
    const vu codes = load_words(reinterpret_cast<const uint16_t*>(half));
    const vu top = p / 2 ? codes << 16 & 0xff000000u : codes << 24;
    return (vf)((vu)((vi)top >> 4) & 0x87f00000u) * spread(0x1p112f);
#endif
  }
};

struct IntegerOperands {
  typedef vi Sum;
  typedef vu Operand;
  static constexpr int PER_ITEM = 2;
  static constexpr bool FINITE = true, INTEGERS = true;
  static constexpr float UNIT = 1;
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

template <>
struct Operands<Word::INT8> : IntegerOperands {
  typedef int16_t Halves __attribute__((vector_size(VECTOR_BYTES)));
  static constexpr int PARTS = 2;
  static QT_INLINE vu part(const uint8_t* words, int p) {
    const vu word = load_vector<vu>(words);
    return (vu)((Halves)(p ? word : word << 8) >> 8);
  }
};

template <>
struct Operands<Word::INT4> : IntegerOperands {
  static constexpr int PARTS = 4;
  // Pairs lie in the order 0, 2, 1, 3.
  static QT_INLINE vu part(const uint8_t* words, int p) {
    return load_vector<vu>(words) >> 4 * byte_of(p) & 0x000f000fu;
  }
};

// How keys, or values, of a kind are multiplied.
template <int KIND>
using Keys = Operands<kv_form(KIND).keys.word>;
template <int KIND>
using Values = Operands<kv_form(KIND).values.word>;

}  // namespace qt
