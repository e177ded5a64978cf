// An item's query rows in the form that its products take.
#pragma once

#include "attention_matrix.h"
#include "softmax.h"

namespace qt {

struct Queries {
  alignas(64) float items[ROWS * ROW_STRIDE];  // scaled floats, or pairs of integers
  QueryGrid grids[ROWS];
#if defined(QT_AMX)
  Planes planes;
#endif
};

static QT_INLINE void put_float_row(const float* x, int D, float scale, float* items) {
  for (int d = 0; d < D; d += WIDTH) store_vector(items + d, load_vector<vf>(x + d) * scale);
}

// The scale of a row's integers. Not finite if an element is not: then no score is.
static QT_INLINE float put_integer_row(const float* x, int D, float* items) {
  vf most{}, nothing{};
  for (int d = 0; d < D; d += WIDTH) {
    const vf v = load_vector<vf>(x + d);
    most = max(most, max(v, -v));
    nothing += v * 0.f;
  }
  const float largest = highest(in_register(most));
  const float inverse = largest > 1e-30f && largest < 3e38f ? INTEGER_TOP / largest : 0;
  for (int d = 0; d < D; d += WIDTH)
    store_pairs(items, d, to_integer(load_vector<vf>(x + d) * inverse));
  return largest * (1 / INTEGER_TOP) + sum(in_register(nothing));
}

// A row for one page's keys by channel: times each channel's scale, and the sum of its minima.
static QT_INLINE QueryGrid put_page_row(const float* x, int D, const uint8_t* grid, float* items) {
  const auto* scales = reinterpret_cast<const uint16_t*>(grid);
  alignas(64) float scaled[MAX_HEAD_DIM];
  vf offset{};
  for (int d = 0; d < D; d += WIDTH) {
    const vf v = load_vector<vf>(x + d);
    store_vector(scaled + d, v * load_half(scales + d));
    offset = multiply_add(v, load_half(scales + D + d), offset);
  }
  const float scale = put_integer_row(scaled, D, items);
  return {scale, sum(in_register(offset))};
}

}  // namespace qt
