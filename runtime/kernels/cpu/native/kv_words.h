// What products make of stored words. The other factor's rows are items of 4 bytes: a float, or two
// 16-bit integers for two neighbours. A word has PARTS operands, one for each of its items.
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
  static QT_INLINE vf part(vu word, int) { return (vf)word; }
};

template <>
struct Operands<Word::BF16> : FloatOperands {
  static constexpr int PARTS = 2;
  static QT_INLINE vf part(vu word, int p) { return (vf)(p ? word & 0xffff0000u : word << 16); }
};

// With float's bias a code's bits are its value times 2**-120, 2**-60 for each factor to make up.
// The codes of NaN become 480.
template <>
struct Operands<Word::FP8> : FloatOperands {
  static constexpr int PARTS = 4;
  static constexpr bool FINITE = true;
  static constexpr float UNIT = 0x1p60f;
  static QT_INLINE vf part(vu word, int p) {
    const vu top = p == 3 ? word : word << (24 - 8 * byte_of(p));
    return (vf)((vu)((vi)top >> 4) & 0x87f00000u);
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
  static QT_INLINE vu part(vu word, int p) { return (vu)((Halves)(p ? word : word << 8) >> 8); }
};

template <>
struct Operands<Word::INT4> : IntegerOperands {
  static constexpr int PARTS = 4;
  // Pairs lie in the order 0, 2, 1, 3.
  static QT_INLINE vu part(vu word, int p) { return word >> 4 * byte_of(p) & 0x000f000fu; }
};

// How keys, or values, of a kind are multiplied.
template <int KIND>
using Keys = Operands<kv_form(KIND).keys.word>;
template <int KIND>
using Values = Operands<kv_form(KIND).values.word>;

}  // namespace qt
