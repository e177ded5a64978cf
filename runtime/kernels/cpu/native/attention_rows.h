// How the rows of a step enter a layer's pages, and where those pages are that are not full yet.
//
// Where a layer has tail pages, a row sees its own page as it was computed. Of the pages that a
// sequence's rows lie in, the first one is its tail page; those after it are made in memory of the
// step, and the last of them is copied to the tail page when all rows have seen what they may.
#pragma once

#include "attention_plan.h"
#include "buffer.h"

namespace qt {

// Rows [row, row + count) of a step, at positions [position, position + count) of a sequence, in one
// page or, without tail pages, one tile.
struct Segment {
  int span, row, count;
  int64_t position;
};

struct RowPlan {
  std::vector<Segment> segments;
  std::vector<int64_t> made_of;  // of a span: the number of its second page among those made
  Buffer made;                   // pages, for one layer at a time
};

// has_tails: of any of the layers; tail_bytes: of a layer's tail page.
inline void plan_rows(RowPlan& plan, const Span* spans, int num_spans, bool has_tails,
                      size_t tail_bytes) {
  plan.segments.clear();
  plan.made_of.clear();
  const int unit = has_tails ? PAGE : TILE;
  int64_t made = 0;
  for (int s = 0; s < num_spans; s++) {
    int row = int(spans[s].start);
    for (int64_t p = spans[s].first(), end; p < spans[s].context; row += int(end - p), p = end) {
      end = std::min((p / unit + 1) * unit, spans[s].context);
      plan.segments.push_back({s, row, int(end - p), p});
    }
    plan.made_of.push_back(made);
    made += (spans[s].context - 1) / PAGE - spans[s].first() / PAGE;
  }
  if (has_tails) plan.made.reserve<uint8_t>(made * tail_bytes);
}

// What a step's layers have in common: its sequences.
struct Sequences {
  const Span* spans;
  const int64_t* tables;  // [spans][table_width]
  int64_t table_width;
  const int64_t* tails;  // [spans]: its tail page; or null
  const RowPlan* plan;
};

// One layer, and the sequences of a step.
struct AttentionLayer : Sequences {
  const KvLayer* kv;
  float scale;
  int64_t window;  // in tokens; 0: none
  float softcap;   // of scores; 0: none
  PageLayout at, exact_at;  // of stored pages, and of those that are not full

  AttentionLayer(const Sequences& sequences, const KvLayer* layer, float scale, int64_t window,
                 float softcap)
      : Sequences(sequences),
        kv(layer),
        scale(scale),
        window(window),
        softcap(softcap),
        at(layer->shape.layout()),
        exact_at(layer->shape.tail().layout()) {}

  // The stored page of `token`, a place in a span's sequence, and one KV head; then its tile.
  uint8_t* page(int span, int64_t token, int64_t head) const {
    return at.page(kv->pages, tables[span * table_width + token / kv->shape.block_size], head);
  }
  uint8_t* tile(int span, int64_t token, int64_t head) const {
    return at.tile(page(span, token, head), token % kv->shape.block_size);
  }
  // The page of a span's row as it is computed. In a decode step there is only one.
  uint8_t* exact_page(int span, int64_t token, int64_t head) const {
    const int64_t number = token / PAGE - spans[span].first() / PAGE;
    if (number == 0) return exact_at.page(kv->tails + tails[span] * kv->tail_stride, 0, head);
    return exact_at.page(plan->made.get<uint8_t>(), plan->made_of[span] + number - 1, head);
  }
};

// Rotary embedding (Su et al. 2021, section 3.2), halves rotated; tables [positions][head_dim / 2].
struct Rotary {
  const float *cos, *sin;
};

// Turns one head's vector in place.
void rotate(const Rotary& rotary, int head_dim, int64_t position, float* x);

// Keys and values of a step's rows, floats apart by a stride, heads side by side.
struct NewRows {
  float* keys;
  const float* values;
  int64_t stride;
  const Rotary* rotary;  // turns keys first; null: they are turned
};

// Stores a segment's rows of one KV head, and its page once that is full.
void store_segment(const AttentionLayer& layer, const Segment& segment, int64_t head,
                   const NewRows& rows);

// Copies a span's last page to its tail page, if that is where the next rows look for it.
void keep_tail(const AttentionLayer& layer, int span);

}  // namespace qt
