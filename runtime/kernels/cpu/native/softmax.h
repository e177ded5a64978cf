// Scores of rows over one split to weights: the step between attention's two products.
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

// Scales of a part's tokens, and minima of its values, for each group of channels.
struct Grids {
  alignas(64) float keys[SPLIT], scales[MAX_GROUPS][SPLIT], lows[MAX_GROUPS][SPLIT];
};

static QT_INLINE void widen_halves(const uint8_t* from, float factor, float* to) {
  for (int i = 0; i < TILE; i += WIDTH)
    store_vector(to + i, load_half(reinterpret_cast<const uint16_t*>(from) + i) * factor);
}

static QT_INLINE void fill(float x, float* to) {
  for (int i = 0; i < TILE; i += WIDTH) store_vector(to + i, spread(x));
}

template <int KIND>
static void read_grids(const KvLayer& layer, const PageLayout& at, int64_t head, const Part& part,
                       Grids& out) {
  constexpr KvForm FORM = kv_form(KIND);
  constexpr float KEY_UNIT = Keys<KIND>::UNIT, UNIT = Values<KIND>::UNIT;
  for (int t = part.begin; t < part.end; t += TILE) {
    const uint8_t* tile = part.tiles[t / TILE];
    if constexpr (FORM.keys.sharing == Sharing::HEAD)
      widen_halves(tile + at.key_grid, KEY_UNIT, out.keys + t);
    else if constexpr (FORM.keys.sharing == Sharing::LAYER)
      fill(layer.key_scales[head] * KEY_UNIT, out.keys + t);
    if constexpr (FORM.values.sharing == Sharing::HEAD)
      widen_halves(tile, UNIT, out.scales[0] + t);
    else if constexpr (FORM.values.sharing == Sharing::LAYER)
      fill(layer.value_scales[head] * UNIT, out.scales[0] + t);
    if constexpr (FORM.keys.sharing == Sharing::LAYER)
      mark_unknown(at, int(layer.shape.head_dim), tile, out.keys + t, out.scales[0] + t);
    if constexpr (FORM.values.sharing == Sharing::GROUP)
      for (int g = 0; g < layer.shape.groups(); g++, tile += 2 * TILE * HALF) {
        widen_halves(tile, 1, out.scales[g] + t);
        widen_halves(tile + TILE * HALF, 1, out.lows[g] + t);
      }
  }
}

// A query row: keys times it are scale * sums + offset.
struct QueryGrid {
  float scale, offset;
};

// cap * tanh(score / cap) (Gemma 2 report, section 2).
static QT_INLINE vf soft_cap(vf score, float cap) {
  const vf twice = score * (2 / cap);
  const vf cut = twice > 80.f ? spread(80.f) : twice;  // exp(2 x) / (exp(2 x) + 1) is 1 there
  return cap - 2 * cap / (exp(cut) + 1.f);
}

// Over the tokens of a split that a row may see: the highest score, and values' highest scales.
struct Highest {
  float score = NEVER, scales[MAX_GROUPS] = {};
};

// Values are scales * sums + lows.
struct RowWeights {
  float top, sum, scales[MAX_GROUPS], lows[MAX_GROUPS];
};

// Sums over tokens [begin, end) of a split, begin in whole tiles, in place to scores. Apart from the
// weights, because they wait for the highest score: meanwhile the processor computes the next row's.
// `cap` is the soft cap; 0: none.
template <int KIND>
QT_NOINLINE static void score(const Grids& grids, int groups, float cap, Seen seen, int begin,
                              int end, QueryGrid query, float* scores, Highest& top) {
  constexpr Sharing SHARING = kv_form(KIND).keys.sharing;
  vf tops = spread(top.score);
  for (int t = begin; t < end; t += WIDTH) {
    vf s = load_vector<vf>(scores + t);
    if constexpr (Keys<KIND>::INTEGERS) s = to_float((vi)s);
    if constexpr (SHARING == Sharing::CHANNEL)
      s = multiply_add(s, spread(query.scale), spread(query.offset));
    else if constexpr (SHARING != Sharing::NOTHING)
      s = s * (load_vector<vf>(grids.keys + t) * query.scale);
    if (cap > 0) s = soft_cap(s, cap);
    s = seen.keep(t, s, NEVER);
    store_vector(scores + t, s);
    tops = max(tops, s);
  }
  top.score = highest(in_register(tops));
  if constexpr (Values<KIND>::INTEGERS)
    for (int g = 0; g < groups; g++) {
      vf most = spread(top.scales[g]);
      for (int t = begin; t < end; t += WIDTH)
        most = max(most, seen.keep(t, load_vector<vf>(grids.scales[g] + t), 0));
      top.scales[g] = highest(in_register(most));
    }
}

// Items of one group of channels: a token's weight times its value's scale.
struct ItemGrid {
  const float *scales, *lows;
  float inverse;
  vf minima;

  ItemGrid(const Grids& grids, int group, float top)
      : scales(grids.scales[group]),
        lows(grids.lows[group]),
        inverse(top > 1e-30f ? INTEGER_TOP / top : 0),
        minima{} {}

  template <bool HAS_LOWS>
  QT_INLINE void put(Seen seen, int t, vf weight, float* items) {
    vf scale = load_vector<vf>(scales + t);
    if (!seen.all(t)) scale = seen.keep(t, scale, 0);
    const vf scaled = weight * scale;
    store_pairs(items, t, (vi)multiply_add(scaled, spread(inverse), spread(ROUND)));
    // Without minima: 0, but NaN where a scale is, which no integer can tell.
    if constexpr (HAS_LOWS)
      minima = multiply_add(weight, seen.keep(t, load_vector<vf>(lows + t), 0), minima);
    else
      minima += scaled * 0.f;
  }
};

// Scores to exp(score - top), in place where a token has one item, of the first or only group.
template <int KIND>
static QT_INLINE vf soften_first(const Grids& grids, Seen seen, int begin, int end, float top,
                                 ItemGrid& grid, float* scores, float* items) {
  constexpr Sharing SHARING = kv_form(KIND).values.sharing;
  vf total{};
  for (int t = begin; t < end; t += WIDTH) {
    vf weight = exp(load_vector<vf>(scores + t) - top);
    if (!seen.all(t)) weight = seen.keep(t, weight, 0);
    total += weight;
    if constexpr (Values<KIND>::INTEGERS) {
      if constexpr (SHARING == Sharing::GROUP) store_vector(scores + t, weight);
      grid.template put<SHARING == Sharing::GROUP>(seen, t, weight, items);
    } else {
      if constexpr (SHARING != Sharing::NOTHING)
        weight = weight * seen.keep(t, load_vector<vf>(grids.scales[0] + t), 0);
      store_vector(items + t, weight);
    }
  }
  return total;
}

// Floats from one group's items of a row to the next's.
constexpr int GROUP_ITEMS = SPLIT / 2;

// Scores to items of weights. `items` may be the scores where values have no groups.
template <int KIND>
QT_NOINLINE static RowWeights soften(const Grids& grids, int groups, Seen seen, int begin, int end,
                                     const Highest& top, float* scores, float* items) {
  RowWeights row;
  row.top = top.score;
  ItemGrid first(grids, 0, top.scales[0]);
  const vf total = soften_first<KIND>(grids, seen, begin, end, top.score, first, scores, items);
  row.sum = sum(in_register(total));
  row.scales[0] = Values<KIND>::INTEGERS ? top.scales[0] * (1 / INTEGER_TOP) : Values<KIND>::UNIT;
  row.lows[0] = sum(in_register(first.minima));
  if constexpr (kv_form(KIND).values.sharing == Sharing::GROUP)
    for (int g = 1; g < groups; g++) {
      ItemGrid grid(grids, g, top.scales[g]);
      for (int t = begin; t < end; t += WIDTH)
        grid.template put<true>(seen, t, load_vector<vf>(scores + t), items + g * GROUP_ITEMS);
      row.scales[g] = top.scales[g] * (1 / INTEGER_TOP);
      row.lows[g] = sum(in_register(grid.minima));
    }
  return row;
}

}  // namespace qt
