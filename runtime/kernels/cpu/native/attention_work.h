// One item's attention: its rows over each split of their context.
#pragma once

#include "attention.h"
#include "attention_queries.h"

namespace qt {

inline void put_nothing(int rows, Partial out) {
  for (int r = 0; r < rows; r++) out.top[r] = NEVER;
}

// One item's share of a layer.
template <int KIND>
class Work {
  static constexpr KvForm FORM = kv_form(KIND);
  static constexpr Word KEY_WORD = FORM.keys.word, VALUE_WORD = FORM.values.word;
  static constexpr bool BY_CHANNEL = FORM.keys.sharing == Sharing::CHANNEL;
  static constexpr bool GROUPED = FORM.values.sharing == Sharing::GROUP;

 public:
  Work(const AttentionLayer& layer, const Item& item, const AttentionRows& rows)
      : layer_(layer),
        item_(item),
        rows_(rows),
        at_(layer.at),
        D_(int(layer.kv->shape.head_dim)),
        groups_(GROUPED ? layer.kv->shape.groups() : 1),
        count_(item.tokens * item.heads),
        position_(layer.spans[item.span].first() + item.first),
        by_matrix_(Keys<KIND>::INTEGERS && matrix_unit_attends(layer.kv->shape, count_)) {
    fetch(first_split());
    load_queries();
  }

  // The first split that a row's window reaches.
  int first_split() const { return int(lowest(0) / SPLIT); }

  void split(int number, Partial out) const {
    const int64_t start = int64_t(number) * SPLIT;
    const int begin = int(std::max<int64_t>(0, lowest(0) - start)) / TILE * TILE;
    const int end = int(std::min<int64_t>(SPLIT, position_ + item_.tokens - start));
    if (begin >= end) return put_nothing(count_, out);  // the window has left this split
    if constexpr (FORM.has_tails()) {
      const int64_t own_page = position_ / PAGE * PAGE - start;
      const int own = int(std::min<int64_t>(std::max<int64_t>(own_page, begin), end));
      if (own == end) return stored(start, begin, end, out);
      if (own == begin) return exact(start, begin, end, out);
      OwnPartial own_part;
      stored(start, begin, own, out);
      exact(start, own, end, own_part.view());
      join(out, own_part.view());
    } else {
      stored(start, begin, end, out);
    }
  }

  // Adds `part`, the next split, to `into`. Not inlined, as all callers must get the same bits: of
  // two products in a sum the compiler may fuse either one.
  QT_NOINLINE void join(Partial into, Partial part) const {
    for (int r = 0; r < count_; r++) {
      const float top = std::max(into.top[r], part.top[r]);
      if (part.top[r] == NEVER) continue;
      vf shift = spread(part.top[r] - top);
      shift[0] = into.top[r] - top;
      const vf decay = exp(shift);
      const vf a = spread(into.top[r] == NEVER ? 0.f : decay[0]), b = spread(decay[1]);
      float *sums = into.out + r * ROW_STRIDE;
      const float* more = part.out + r * ROW_STRIDE;
      into.top[r] = top;
      into.weight[r] = into.weight[r] * a[0] + part.weight[r] * b[0];
      for (int d = 0; d < D_; d += WIDTH)
        store_vector(sums + d, load_vector<vf>(sums + d) * a + load_vector<vf>(more + d) * b);
    }
  }

  void finish(Partial result) const {
    for (int r = 0; r < count_; r++) {
      float* to = rows_.out + row(r) * rows_.out_stride + head(r) * D_;
      const float* from = result.out + r * ROW_STRIDE;
      const float inverse = 1 / result.weight[r];
      for (int d = 0; d < D_; d += WIDTH)
        store_vector(to + d, load_vector<vf>(from + d) * inverse);
    }
  }

 private:
  int64_t row(int r) const { return layer_.spans[item_.span].start + item_.first + r / item_.heads; }
  int head(int r) const { return item_.head + r % item_.heads; }
  int64_t lowest(int token) const {
    return layer_.window ? std::max<int64_t>(0, position_ + token - layer_.window + 1) : 0;
  }
  Seen seen(int r, int64_t start) const {
    const int token = r / item_.heads;
    return {int(std::max<int64_t>(lowest(token) - start, 0)),
            int(std::min<int64_t>(position_ + token - start, SPLIT))};
  }

  void load_queries() {
    for (int r = 0; r < count_; r++) {
      alignas(64) float turned[MAX_HEAD_DIM];
      const float* x = query(r, turned);
      float* items = queries_.items + r * ROW_STRIDE;
      if constexpr (Keys<KIND>::INTEGERS && !BY_CHANNEL) {
        queries_.grids[r] = {put_integer_row(x, D_, items) * layer_.scale, 0};
        put_planes(queries_, r);
      } else {
        put_float_row(x, D_, layer_.scale * Keys<KIND>::UNIT, items);
        queries_.grids[r] = {1, 0};
      }
    }
  }

  // A row's query, rotated, in `turned` if need be.
  const float* query(int r, float (&turned)[MAX_HEAD_DIM]) const {
    const float* x = rows_.queries + row(r) * rows_.query_stride + head(r) * D_;
    if (!rows_.rotary) return x;
    std::memcpy(turned, x, D_ * sizeof(float));
    rotate(*rows_.rotary, D_, position_ + r / item_.heads, turned);
    return turned;
  }

  void put_planes([[maybe_unused]] Queries& queries, [[maybe_unused]] int r) const {
#if defined(QT_AMX)
    if (by_matrix_)
      split_row(queries.items + r * ROW_STRIDE, D_, queries.planes.high[r], queries.planes.low[r]);
#endif
  }

  // The keys of a split, if there are any, ahead of their product.
  void fetch([[maybe_unused]] int split) const {
#if defined(QT_AMX)
    if (!by_matrix_ || KEY_WORD != Word::INT8) return;
    const int64_t start = int64_t(split) * SPLIT;
    const int64_t last = FORM.has_tails() ? position_ / PAGE * PAGE : position_ + item_.tokens;
    const int64_t end = std::min(start + SPLIT, last);
    for (int64_t t = start; t < end; t += TILE)
      fetch_keys(layer_.tile(item_.span, t, item_.kv_head) + at_.keys, at_.values - at_.keys);
#endif
  }

  // Rows over tokens [begin, end) of the split at `start`, in the pages that are stored.
  void stored(int64_t start, int begin, int end, Partial out) const {
    const uint8_t* tiles[SPLIT_TILES] = {};
    for (int t = begin; t < end; t += TILE)
      tiles[t / TILE] = layer_.tile(item_.span, start + t, item_.kv_head);
    const Part part = {tiles, start, begin, end};
    alignas(64) float scores[ROWS * ROW_STRIDE];
    Grids grids;
    read_grids<KIND>(*layer_.kv, at_, item_.kv_head, part, grids);
    Highest tops[ROWS];
    score_keys(part, grids, scores, tops);
    if constexpr (GROUPED) {
      alignas(64) float items[ROWS * ROW_STRIDE];
      weigh_values(part, grids, tops, scores, items, out);
    } else {
      weigh_values(part, grids, tops, scores, scores, out);
    }
  }

  void score_keys(const Part& part, const Grids& grids, float* scores, Highest* tops) const {
    if constexpr (!BY_CHANNEL) {
      score_part(part, queries_, grids, scores, tops);
    } else {
      Queries queries;
      for (int t = part.begin; t < part.end;) {
        const int end = std::min((t / PAGE + 1) * PAGE, part.end);
        const uint8_t* page = layer_.page(item_.span, part.start + t, item_.kv_head);
        for (int r = 0; r < count_; r++) {
          const int at = r * ROW_STRIDE;
          queries.grids[r] = put_page_row(queries_.items + at, D_, page, queries.items + at);
          put_planes(queries, r);
        }
        score_part({part.tiles, part.start, t, end}, queries, grids, scores, tops);
        t = end;
      }
    }
  }

  void score_part(const Part& part, const Queries& queries, const Grids& grids, float* scores,
                  Highest* tops) const {
    multiply_queries(part, queries, scores + part.begin);
    for (int r = 0; r < count_; r++)
      score<KIND>(grids, groups_, layer_.softcap, seen(r, part.start), part.begin, part.last(),
                  queries.grids[r], scores + r * ROW_STRIDE, tops[r]);
  }

  void multiply_queries(const Part& part, const Queries& queries, float* out) const {
#if defined(QT_AMX)
    if constexpr (Keys<KIND>::INTEGERS)
      if (by_matrix_) {
        MatrixBytes keys;
        if (KEY_WORD == Word::INT4) put_keys<KEY_WORD>(part, D_, at_.keys, keys);
        return multiply_keys<KEY_WORD>(part, D_, at_.keys, count_, queries.planes, keys, out);
      }
#endif
    multiply<KEY_WORD>(find_keys<KEY_WORD>(part, D_, at_.keys), count_, queries.items, out);
  }

  void weigh_values(const Part& part, const Grids& grids, const Highest* tops, float* scores,
                    float* items, Partial out) const {
#if defined(QT_AMX)
    MatrixBytes values;
    if constexpr (Values<KIND>::INTEGERS)
      if (by_matrix_) put_values<VALUE_WORD>(part, D_, at_.values, values);
#endif
    fetch(int(part.start / SPLIT) + 1);
    RowWeights weights[ROWS];
    for (int r = 0; r < count_; r++)
      weights[r] = soften<KIND>(grids, groups_, seen(r, part.start), part.begin, part.last(),
                                tops[r], scores + r * ROW_STRIDE, items + r * ROW_STRIDE);
    const int width = D_ / groups_;
    const float* from = items + part.begin / Values<KIND>::PER_ITEM;
    for (int g = 0; g < groups_; g++, from += GROUP_ITEMS) {
#if defined(QT_AMX)
      if constexpr (Values<KIND>::INTEGERS)
        if (by_matrix_) {
          multiply_values(part, D_, g * width, width, count_, from, values, out.out + g * width);
          continue;
        }
#endif
      multiply<VALUE_WORD>(find_values<VALUE_WORD>(part, D_, at_.values, g * width, width), count_,
                           from, out.out + g * width);
    }
    put_result(weights, out);
  }

  void put_result(const RowWeights* weights, Partial out) const {
    const int width = D_ / groups_;
    for (int r = 0; r < count_; r++) {
      out.top[r] = weights[r].top, out.weight[r] = weights[r].sum;
      if constexpr (FORM.values.sharing != Sharing::NOTHING)
        for (int g = 0; g < groups_; g++)
          for (int d = 0; d < width; d += WIDTH) {
            float* at = out.out + r * ROW_STRIDE + g * width + d;
            vf sums = load_vector<vf>(at);
            if constexpr (Values<KIND>::INTEGERS) sums = to_float((vi)sums);
            store_vector(at, multiply_add(sums, spread(weights[r].scales[g]),
                                          spread(weights[r].lows[g])));
          }
    }
  }

  // Rows over tokens of their own page, as they were computed.
  void exact(int64_t start, int begin, int end, Partial out) const {
    if (layer_.kv->shape.tail_kind == KV_FP32) exact_part<KV_FP32>(start, begin, end, out);
    else exact_part<KV_BF16>(start, begin, end, out);
  }

  template <int TAIL>
  void exact_part(int64_t start, int begin, int end, Partial out) const {
    constexpr Word WORD = kv_form(TAIL).keys.word;
    const PageLayout& places = layer_.exact_at;
    uint8_t* page = layer_.exact_page(item_.span, position_, item_.kv_head);
    const uint8_t* tiles[SPLIT_TILES] = {};
    for (int t = begin; t < end; t += TILE) tiles[t / TILE] = places.tile(page, (start + t) % PAGE);
    const Part part = {tiles, start, begin, end};
    alignas(64) float scores[ROWS * ROW_STRIDE], items[BY_CHANNEL ? 1 : ROWS * ROW_STRIDE];
    Grids none;
    multiply<WORD>(find_keys<WORD>(part, D_, 0), count_, float_queries(items), scores + begin);
    for (int r = 0; r < count_; r++) {
      Highest top;
      float* row = scores + r * ROW_STRIDE;
      score<TAIL>(none, 1, layer_.softcap, seen(r, start), begin, part.last(), {1, 0}, row, top);
      const RowWeights weights =
          soften<TAIL>(none, 1, seen(r, start), begin, part.last(), top, row, row);
      out.top[r] = weights.top, out.weight[r] = weights.sum;
    }
    multiply<WORD>(find_values<WORD>(part, D_, places.values, 0, D_), count_, scores + begin, out.out);
  }

  // Scaled rows: those at hand where keys are by channel, made in `items` where rows are integers.
  const float* float_queries(float* items) const {
    if constexpr (BY_CHANNEL) {
      return queries_.items;
    } else {
      for (int r = 0; r < count_; r++) {
        alignas(64) float turned[MAX_HEAD_DIM];
        put_float_row(query(r, turned), D_, layer_.scale, items + r * ROW_STRIDE);
      }
      return items;
    }
  }

  const AttentionLayer& layer_;
  const Item& item_;
  const AttentionRows& rows_;
  const PageLayout& at_;
  const int D_, groups_, count_;
  const int64_t position_;  // of the first token
  const bool by_matrix_;
  Queries queries_;  // of keys by channel: floats, for each page's own
};

}  // namespace qt
