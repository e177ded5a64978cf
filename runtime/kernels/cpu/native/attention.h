// Causal attention over paged keys and values, grouped-query, with online softmax
// (Milakov & Gimelshein 2018; split over the context as in Dao et al. 2023, Flash-Decoding).
//
// A split gives (highest score, sum of weights, weighted values), and splits are joined in rising
// order. Splits and order depend on a row's own position alone, and a key that a row may not see
// adds an exact zero: a row gets the same bits whatever its chunk, its company or the number of
// threads, whether one thread runs all splits or several share them.
//
// Over int8 pages queries and weights are integers of 16 bits, a scale each for a row: products
// are exact integers, and the rounding costs 1e-5 of a result.
#pragma once

#include "attention_plan.h"

namespace qt {

struct AttentionLayer {
  const KvShape* shape;
  uint8_t* pages;
  const Span* spans;
  const int64_t* tables;  // [spans][table_width]
  int64_t table_width;
  float scale;
  int64_t window;  // in tokens; 0: none

  // The tile of `token`, a place in a span's sequence, and one KV head.
  uint8_t* tile(int span, int64_t token, int64_t head) const {
    const int64_t block = tables[span * table_width + token / shape->block_size];
    return shape->tile(pages, block, token % shape->block_size, head);
  }
};

// Rotary embedding (Su et al. 2021, section 3.2), halves rotated; tables [positions][head_dim / 2].
struct Rotary {
  const float *cos, *sin;
};

// Turns one head's vector in place.
void rotate(const Rotary& rotary, int head_dim, int64_t position, float* x);

// Rows of the batch, floats apart by a stride, heads side by side.
struct AttentionRows {
  const float* queries;
  int64_t query_stride;
  float* out;
  int64_t out_stride;
  const Rotary* rotary;  // turns queries as they are read; null: they are turned
};

// One unit of the plan. The last one of an item to end writes the item's rows.
void attend_unit(const AttentionLayer& layer, AttentionPlan& plan, Unit unit,
                 const AttentionRows& rows);

// The matrix unit made ready for a thread's attention, where some items are for it.
class AttentionUnit {
 public:
  AttentionUnit(const KvShape& shape, int most_rows);
  ~AttentionUnit();
  AttentionUnit(const AttentionUnit&) = delete;

 private:
  const bool used_;
};

// A thread's part of one layer's attention; `next` is shared and starts at 0. before(unit) runs
// ahead of each unit's work.
template <class Before>
void attend(const AttentionLayer& layer, AttentionPlan& plan, std::atomic<int>& next,
            const AttentionRows& rows, Before before) {
  const AttentionUnit unit(*layer.shape, plan.most_rows);
  const int units = int(plan.units.size());
  for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < units;) {
    before(plan.units[i]);
    attend_unit(layer, plan, plan.units[i], rows);
  }
}

}  // namespace qt

// One layer's attention alone, for tests and benchmarks; queries and out [rows][num_heads][head_dim].
QT_API void qt_attention(const qt::AttentionLayer* layer, int64_t num_spans, int64_t num_heads,
                         const float* queries, float* out);
