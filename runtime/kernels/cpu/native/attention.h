// Causal attention over paged keys and values, grouped-query, with online softmax
// (Milakov & Gimelshein 2018; split over the context as in Dao et al. 2023, Flash-Decoding).
//
// A split gives (highest score, sum of weights, weighted values), and splits are joined in rising
// order. Splits and order depend on a row's own position alone, and a key that a row may not see
// adds an exact zero: a row gets the same bits whatever its chunk, its company or the number of
// threads, whether one thread runs all splits or several share them.
//
// Over integer codes queries and weights are integers of 16 bits, a scale each for a row: products
// are exact integers, and the rounding costs 1e-5 of a result. Scales of keys multiply scores, those
// of values weights; a channel's scale multiplies the query, page by page.
#pragma once

#include "attention_rows.h"

namespace qt {

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
  const AttentionUnit unit(layer.kv->shape, plan.most_rows);
  const int units = int(plan.units.size());
  for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < units;) {
    before(plan.units[i]);
    attend_unit(layer, plan, plan.units[i], rows);
  }
}

}  // namespace qt

// One layer alone: rows [rows][heads][head_dim], turned, of sequences on pages of their own.
struct qt_layer_call {  // mirrored by qtool.runtime.kernels.cpu.kv_attention._Call
  const qt::KvLayer* kv;
  const qt::Span* spans;
  const int64_t* tables;  // [num_spans][table_width]
  const int64_t* tails;   // [num_spans], or null
  const float* queries;   // [rows][num_heads][head_dim]
  float *keys;            // [rows][kv_heads][head_dim]; or null: they are stored
  const float *values;
  float* out;             // as queries
  int64_t num_spans, table_width, num_heads, window;
  float scale, softcap;
};

// Stores keys and values, then attends.
QT_API void qt_attend(const qt_layer_call* call);
