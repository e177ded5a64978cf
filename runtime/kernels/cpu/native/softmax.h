// Scores of one row over one split to weights: the step between attention's two products.
#pragma once

#include "attention_products.h"

namespace qt {

// 16-bit integers of a row: the largest magnitude becomes this. 256 codes of 8 bits times it stay in
// 32 bits.
constexpr float INTEGER_TOP = 32767.f;
// Codes of 8 bits count from here.
constexpr int CODE_MIDDLE = 128;

// Rounded to nearest, ties to even; |x| < 2**22. What NaN becomes is no error, and no number.
static QT_INLINE vi to_integer(vf x) { return (vi)(x + 12582912.f) - 0x4b400000; }

static QT_INLINE void store_pairs(float* items, int at, vi x) {
  typedef int16_t Half __attribute__((vector_size(2 * WIDTH)));
  const Half half = __builtin_convertvector(x, Half);
  __builtin_memcpy(reinterpret_cast<char*>(items) + 2 * at, &half, sizeof half);
}

// Which tokens of a split a row may see: [low, high].
struct Seen {
  int low, high;

  // x where token `at` + lane is seen, and `other` where it is not.
  QT_INLINE vf keep(int at, vf x, float other) const {
    if (low <= at && at + WIDTH - 1 <= high) return x;
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
  // Over int8 pages: values are scale * (integers + offset) + middle.
  float scale = 1, middle = 0;
  int32_t offset = 0;
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

// Integer scores [SPLIT]: in place to items of weights, exp(score - top) times the value's step.
QT_NOINLINE static RowWeights soften_int8(const uint8_t* const* tiles, Seen seen, int begin, int end,
                                          const IntegerRow& query, float* scores) {
  alignas(64) float floats[SPLIT];
  vf tops = spread(NEVER), most{};
  const int32_t offset = -CODE_MIDDLE * query.sum;
  const float sum_of_query = float(query.sum) * query.scale;
  for (int t = begin; t < end; t += WIDTH) {
    const float* grid = reinterpret_cast<const float*>(tiles[t / TILE]) + t % TILE;
    const vf dot = to_float(load_vector<vi>(scores + t) + offset);
    const vf step = load_vector<vf>(grid) * query.scale, middle = load_vector<vf>(grid + TILE);
    const vf s = seen.keep(t, multiply_add(dot, step, middle * sum_of_query), NEVER);
    store_vector(floats + t, s);
    tops = max(tops, s);
    most = max(most, seen.keep(t, load_vector<vf>(grid + 2 * TILE), 0));
  }
  const float top = highest(tops), largest = highest(most);
  const float inverse = largest > 1e-30f ? INTEGER_TOP / largest : 0;
  vf total{}, middles{};
  vi integers{};
  for (int t = begin; t < end; t += WIDTH) {
    const float* grid = reinterpret_cast<const float*>(tiles[t / TILE]) + 2 * TILE + t % TILE;
    const vf weight = seen.keep(t, exp(load_vector<vf>(floats + t) - top), 0);
    const vf step = seen.keep(t, load_vector<vf>(grid), 0);
    const vi integer = to_integer(weight * step * inverse);
    store_pairs(scores, t, integer);
    total += weight;
    middles += weight * seen.keep(t, load_vector<vf>(grid + TILE), 0);
    integers += integer;
  }
  return {top, sum(total), largest * (1 / INTEGER_TOP), sum(middles), -CODE_MIDDLE * sum(integers)};
}

}  // namespace qt
