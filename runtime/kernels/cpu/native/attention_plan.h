// How the attention of a step is cut into work, the same for all its layers.
//
// An item is up to ROWS query rows that share a KV head: the heads of its group, times a few
// neighbouring tokens of a prompt, of one page where a layer has tail pages. Its context is cut into
// splits of SPLIT tokens, counted from the sequence's first token. Splits depend on a row's own
// position alone.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "kv_words.h"

namespace qt {

#if defined(QT_AMX)
constexpr int ROWS = 48;  // three tiles of the matrix unit, which takes 0.1 us to start
#else
constexpr int ROWS = 12;
#endif
constexpr int SPLIT = 128;
constexpr int SPLIT_TILES = SPLIT / TILE;
// Floats from one row to the next in every buffer of rows: a constant, so that the address of a
// row's number is a constant offset, and an odd number of cache lines, so that rows do not fall on the
// same sets of the cache.
constexpr int ROW_STRIDE = MAX_HEAD_DIM + 16;

struct Span {  // rows [start, start + length), the last one at position context - 1
  int64_t start, length, context;

  int64_t first() const { return context - length; }  // position of row `start`
};

struct Item {
  int span;
  int first;     // row within the span
  int tokens;    // rows of the batch
  int kv_head;
  int head;      // first query head
  int heads;     // query heads a token
  int splits;    // up to the last row's position
  int partials;  // number of its first AttentionPlan::partial; -1: one thread runs all splits
};

// Result of an item's rows over part of its context.
struct Partial {
  float* top;     // highest score
  float* weight;  // sum of exp(score - top)
  float* out;     // rows ROW_STRIDE apart: sum of exp(score - top) * value
};

struct OwnPartial {
  float top[ROWS], weight[ROWS];
  alignas(64) float out[ROWS * ROW_STRIDE];

  Partial view() { return {top, weight, out}; }
};

// One thread's piece of work: a split of an item, or all of them.
struct Unit {
  int item, split;
};

struct AttentionPlan {
  std::vector<Item> items;
  std::vector<Unit> units;
  int most_rows;  // of an item
  // Of `most_rows` each: with ROWS each, many threads' decode steps would take gigabytes.
  struct alignas(64) Line { float items[16]; };
  std::vector<Line> partials;
  std::vector<std::atomic<int>> finished;  // splits of an item, over all layers

  size_t lines() const { return 2 * ((most_rows + 15) / 16) + most_rows * (ROW_STRIDE / 16); }
  Partial partial(int number) {
    float* top = partials[number * lines()].items;
    float* weight = top + (most_rows + 15) / 16 * 16;
    return {top, weight, weight + (most_rows + 15) / 16 * 16};
  }
};

// One item for each KV head, part of its query heads, and neighbouring rows.
inline void plan_items(AttentionPlan& plan, const Span* spans, int num_spans, int num_heads,
                       int num_kv_heads, bool has_tails) {
  plan.items.clear();
  plan.units.clear();
  plan.most_rows = 0;
  const int group = num_heads / num_kv_heads, heads = std::min(group, ROWS), tokens = ROWS / heads;
  for (int kv = 0; kv < num_kv_heads; kv++)
    for (int h = 0; h < group; h += heads)
      for (int s = 0; s < num_spans; s++)
        for (int first = 0, count; first < spans[s].length; first += count) {
          const int position = int(spans[s].first()) + first;
          count = std::min(tokens, int(spans[s].length) - first);
          if (has_tails) count = std::min(count, PAGE - position % PAGE);
          plan.items.push_back({s, first, count, kv, kv * group + h, std::min(heads, group - h),
                                (position + count + SPLIT - 1) / SPLIT, -1});
          plan.most_rows = std::max(plan.most_rows, count * plan.items.back().heads);
        }
  // Long items first, so that no thread is left with one at the end.
  std::stable_sort(plan.items.begin(), plan.items.end(),
                   [](const Item& a, const Item& b) { return a.splits > b.splits; });
}

// has_tails: of any of the layers.
inline void plan_attention(AttentionPlan& plan, const Span* spans, int num_spans, int num_heads,
                           int num_kv_heads, bool has_tails, int num_threads) {
  plan_items(plan, spans, num_spans, num_heads, num_kv_heads, has_tails);
  const bool shared = num_threads > 1 && int(plan.items.size()) < 8 * num_threads;
  int partials = 0;
  for (int i = 0; i < int(plan.items.size()); i++) {
    Item& item = plan.items[i];
    if (shared && item.splits > 1) item.partials = partials, partials += item.splits;
    const int units = item.partials < 0 ? 1 : item.splits;
    for (int split = 0; split < units; split++) plan.units.push_back({i, split});
  }
  plan.partials.resize(std::max(plan.partials.size(), partials * plan.lines()));
  if (plan.finished.size() < plan.items.size())
    plan.finished = std::vector<std::atomic<int>>(plan.items.size());
  for (auto& count : plan.finished) count.store(0, std::memory_order_relaxed);
}

}  // namespace qt
