// Scores of one row over one split to weights: the step between attention's two products.
#pragma once

#include "attention_products.h"

namespace qt {

// 16-bit integers of a row: the largest magnitude becomes this. 256 codes of 8 bits times it stay in
// 32 bits.
constexpr float INTEGER_TOP = 32767.f;
// Added to x it leaves x in the low bits, rounded to nearest, ties to even; |x| < 2**22. What NaN
// becomes is no error, and no number.
constexpr float ROUND = 12582912.f;  // 1.5 * 2**23
static QT_INLINE vi to_integer(vf x) { return (vi)(x + ROUND) - 0x4b400000; }

// Reductions go through memory, and without a copy gcc keeps a loop's sums there too.
static QT_INLINE vf in_register(vf v) {
  pin(v);
  return v;
}

// The low 16 bits of each lane.
static QT_INLINE void store_pairs(float* items, int at, vi x) {
#if defined(QT_AVX512)
  const __m256i half = _mm512_cvtepi32_epi16((__m512i)x);  // gcc 12 makes three operations of it
#else
  typedef int16_t Half __attribute__((vector_size(2 * WIDTH)));
  const Half half = __builtin_convertvector(x, Half);
#endif
  __builtin_memcpy(reinterpret_cast<char*>(items) + 2 * at, &half, sizeof half);
}

// Which tokens of a split a row may see: [low, high].
struct Seen {
  int low, high;

  QT_INLINE bool all(int at) const { return low <= at && at + WIDTH - 1 <= high; }
  // x where token `at` + lane is seen, and `other` where it is not.
  QT_INLINE vf keep(int at, vf x, float other) const {
    if (all(at)) return x;
    vi token;
    for (int i = 0; i < WIDTH; i++) token[i] = at + i;
    return (token >= low) & (token <= high) ? x : spread(other);
  }
};

// A query row over int8 pages.
struct IntegerRow {
  float scale;  // of its integers, the attention's scale included
  int32_t sum;  // of its integers
};

struct RowWeights {
  float top, sum;
  // Over int8 pages: values are scale * integers + middle.
  float scale = 1, middle = 0;
};

// Float scores: in place to exp(score - top). Tokens [begin, end) of the split, begin in whole tiles.
QT_NOINLINE static RowWeights soften(Seen seen, int begin, int end, float* scores) {
  vf tops = spread(NEVER);
  for (int t = begin; t < end; t += WIDTH) {
    const vf s = seen.keep(t, load_vector<vf>(scores + t), NEVER);
    store_vector(scores + t, s);
    tops = max(tops, s);
  }
  const float top = highest(tops);
  vf total{};
  for (int t = begin; t < end; t += WIDTH) {
    const vf weight = seen.keep(t, exp(load_vector<vf>(scores + t) - top), 0);
    store_vector(scores + t, weight);
    total += weight;
  }
  return {top, sum(total)};
}

// Of tokens `at` + lane: steps and middles of keys, then of values.
static QT_INLINE const float* grid_of(const uint8_t* const* tiles, int at) {
  return reinterpret_cast<const float*>(tiles[unsigned(at) / TILE]) + unsigned(at) % TILE;
}

// Over the tokens of a split that a row may see.
struct Highest {
  float score, step;  // the step of a value
};

// Integer scores [SPLIT], in place to floats. Apart from the weights, because they wait for the highest
// score: meanwhile the processor computes the next row's.
QT_NOINLINE static Highest score_int8(const uint8_t* const* tiles, Seen seen, int begin, int end,
                                      const IntegerRow& query, float* scores) {
  vf tops = spread(NEVER), most{};
  const float sum_of_query = float(query.sum) * query.scale;
  for (int t = begin; t < end; t += WIDTH) {
    const float* grid = grid_of(tiles, t);
    const vf step = load_vector<vf>(grid) * query.scale;
    const vf middle = load_vector<vf>(grid + TILE) * sum_of_query;
    vf s = multiply_add(to_float(load_vector<vi>(scores + t)), step, middle);
    vf value_step = load_vector<vf>(grid + 2 * TILE);
    if (!seen.all(t)) s = seen.keep(t, s, NEVER), value_step = seen.keep(t, value_step, 0);
    store_vector(scores + t, s);
    tops = max(tops, s);
    most = max(most, value_step);
  }
  return {highest(in_register(tops)), highest(in_register(most))};
}

// Scores, in place to items of weights: exp(score - top) times the value's step.
QT_NOINLINE static RowWeights soften_int8(const uint8_t* const* tiles, Seen seen, int begin, int end,
                                          Highest top, float* scores) {
  const float inverse = top.step > 1e-30f ? INTEGER_TOP / top.step : 0;
  vf total{}, middles{};
  for (int t = begin; t < end; t += WIDTH) {
    const float* grid = grid_of(tiles, t) + 2 * TILE;
    vf weight = exp(load_vector<vf>(scores + t) - top.score);
    vf step = load_vector<vf>(grid), middle = load_vector<vf>(grid + TILE);
    if (!seen.all(t)) {
      weight = seen.keep(t, weight, 0);
      step = seen.keep(t, step, 0), middle = seen.keep(t, middle, 0);
    }
    store_pairs(scores, t, (vi)multiply_add(weight * step, spread(inverse), spread(ROUND)));
    total += weight;
    middles = multiply_add(weight, middle, middles);
  }
  return {top.score, sum(in_register(total)), top.step * (1 / INTEGER_TOP),
          sum(in_register(middles))};
}

}  // namespace qt
