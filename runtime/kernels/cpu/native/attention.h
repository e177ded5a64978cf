#pragma once
// Causal attention over paged keys and values, grouped-query, with online softmax
// (Milakov & Gimelshein 2018; split over the context as in Dao et al. 2023, Flash-Decoding).
//
// An item is up to ROWS query rows that share a KV head: the heads of its group, times a few
// neighbouring tokens of a prompt. Its context is cut into splits of SPLIT tokens, counted from the
// sequence's first token. A split gives (highest score, sum of weights, weighted values), and
// splits are joined in rising order. Splits and order depend on a row's own position alone, and a
// key that a row may not see adds an exact zero: a row gets the same bits whatever its chunk, its
// company or the number of threads, whether one thread runs all splits or several share them.
#include <algorithm>
#include <atomic>
#include <vector>

#include "kv_pages.h"
#include "pool.h"

namespace qt {

// Rows of an item: with 32 vector registers 12 accumulators for the scores and 24 for the values.
#if defined(__AVX512F__)
constexpr int ROWS = 12, VALUE_ROWS = 6, VALUE_VECTORS = 4;
#else
constexpr int ROWS = 6, VALUE_ROWS = 3, VALUE_VECTORS = 2;
#endif
constexpr int SPLIT = 128;
constexpr int SPLIT_TILES = SPLIT / TILE;
constexpr int MAX_HEAD_DIM = 256;

struct Span {  // rows [start, start + length), the last one at position context - 1
  int64_t start, length, context;
};

struct Pages {  // where one sequence's tiles of one KV head and layer lie
  const KvShape* shape;
  uint8_t* layer;
  const int64_t* table;
  int64_t head;

  const uint8_t* tile(int64_t number) const {
    const int64_t token = number * TILE;
    return shape->tile(layer, table[token / shape->block_size], token % shape->block_size, head);
  }
};

struct Item {
  int span;
  int first;     // row within the span
  int tokens;    // rows of the batch
  int kv_head;
  int head;      // first query head
  int heads;     // query heads a token
  int splits;    // up to the last row's position
  int partials;  // first of its entries in AttentionPlan::partials; -1: one thread runs all splits
};

// Running result of an item's rows.
struct Partial {
  float top[ROWS];     // highest score so far
  float weight[ROWS];  // sum of exp(score - top)
  alignas(64) float out[ROWS * MAX_HEAD_DIM];
};

// What to compute in every layer of a step, made once a step.
struct AttentionPlan {
  std::vector<Item> items;
  std::vector<int> work;  // item * SPLITS_AT_MOST + split, or the item alone
  std::vector<Partial> partials;
  std::vector<std::atomic<int>> finished;  // splits of an item, over all layers
  bool shared = false;                     // whether work is by split

  static constexpr int SPLITS_AT_MOST = 1 << 16;
};

struct AttentionLayer {
  const KvShape* shape;
  uint8_t* pages;
  const Span* spans;
  const int64_t* tables;  // [spans][table_width]
  int64_t table_width;
  float scale;
  int64_t window;  // in tokens; 0: none
};

static inline void plan_attention(AttentionPlan& plan, const Span* spans, int num_spans,
                                  int num_heads, int num_kv_heads, int num_threads) {
  plan.items.clear();
  plan.work.clear();
  const int group = num_heads / num_kv_heads, heads = std::min(group, ROWS), tokens = ROWS / heads;
  for (int s = 0; s < num_spans; s++)
    for (int first = 0; first < spans[s].length; first += tokens)
      for (int kv = 0; kv < num_kv_heads; kv++)
        for (int h = 0; h < group; h += heads) {
          const int count = std::min(tokens, int(spans[s].length) - first);
          const int seen = int(spans[s].context - spans[s].length) + first + count;
          plan.items.push_back({s, first, count, kv, kv * group + h, std::min(heads, group - h),
                                (seen + SPLIT - 1) / SPLIT, -1});
        }
  // Long items first, so that no thread is left with one at the end.
  std::stable_sort(plan.items.begin(), plan.items.end(),
                   [](const Item& a, const Item& b) { return a.splits > b.splits; });
  plan.shared = num_threads > 1 && int(plan.items.size()) < 8 * num_threads;
  int partials = 0;
  for (int i = 0; i < int(plan.items.size()); i++) {
    Item& item = plan.items[i];
    item.partials = plan.shared ? partials : -1;
    const int parts = plan.shared ? item.splits : 1;
    for (int split = 0; split < parts; split++)
      plan.work.push_back(i * AttentionPlan::SPLITS_AT_MOST + split);
    partials += plan.shared ? parts : 0;
  }
  if (int(plan.partials.size()) < partials) plan.partials.resize(partials);
  if (plan.finished.size() < plan.items.size()) {
    plan.finished = std::vector<std::atomic<int>>(plan.items.size());
  }
  for (auto& count : plan.finished) count.store(0, std::memory_order_relaxed);
}

// Scores of R rows against T tiles of keys; queries [R][D], out [R][SPLIT].
template <int KIND, int R, int T>
QT_NOINLINE static void score_tiles(const uint8_t* const* tiles, const float* queries, int D,
                                    float* out) {
  using S = Stored<KIND>;
  const uint32_t* keys[T];
  f32x16 sums[R][T];
  QT_UNROLL
  for (int t = 0; t < T; t++) keys[t] = (const uint32_t*)tiles[t] + S::HEADER;
  QT_UNROLL
  for (int r = 0; r < R; r++)
    QT_UNROLL
    for (int t = 0; t < T; t++) sums[r][t] = f32x16{};
#pragma GCC unroll 1
  for (int d = 0; d < D; d += S::P) {
    u32x16 words[T];
    QT_UNROLL
    for (int t = 0; t < T; t++) words[t] = load<u32x16>(keys[t] + d / S::P * TILE);
    QT_UNROLL
    for (int p = 0; p < S::P; p++) {
      f32x16 k[T];
      QT_UNROLL
      for (int t = 0; t < T; t++) k[t] = S::part(words[t], p);
      QT_UNROLL
      for (int r = 0; r < R; r++)
        QT_UNROLL
        for (int t = 0; t < T; t++) sums[r][t] += k[t] * queries[r * D + d + p];
    }
  }
  QT_UNROLL
  for (int r = 0; r < R; r++)
    QT_UNROLL
    for (int t = 0; t < T; t++) store(out + r * SPLIT + t * TILE, sums[r][t]);
}

// Few rows take several tiles at a time, so that enough sums are in flight.
template <int KIND, int R>
static void score_rows(const uint8_t* const* tiles, int count, const float* queries, int D,
                       float* out) {
  constexpr int T = R == 1 ? 8 : R == 2 ? 4 : R == 3 ? 4 : R <= ROWS / 2 ? 2 : 1;
  int t = 0;
  for (; t + T <= count; t += T) score_tiles<KIND, R, T>(tiles + t, queries, D, out + t * TILE);
  for (; t < count; t++) score_tiles<KIND, R, 1>(tiles + t, queries, D, out + t * TILE);
}

template <int KIND>
static void score(const uint8_t* const* tiles, int count, const float* queries, int rows, int D,
                  float* out) {
  while (rows > 0) {
    int done;
#define QT_ROWS(R) \
  if (rows >= R && R <= ROWS) score_rows<KIND, R>(tiles, count, queries, D, out), done = R
    QT_ROWS(12);
    else QT_ROWS(6);
    else QT_ROWS(4);
    else QT_ROWS(3);
    else QT_ROWS(2);
    else score_rows<KIND, 1>(tiles, count, queries, D, out), done = 1;
#undef QT_ROWS
    rows -= done, queries += done * D, out += done * SPLIT;
  }
}

// Weights [R][SPLIT] times the values of tokens [first, end) of a split: out [R], D floats apart, of
// V vectors of channels. Tokens out of the range are not touched: what is not the sequence's own may
// be NaN.
template <int KIND, int R, int V>
QT_NOINLINE static void weigh_block(const uint8_t* const* tiles, const float* weights, int first,
                                    int end, int D, int channel, float* out) {
  using S = Stored<KIND>;
  f32x16 sums[R][V];
  QT_UNROLL
  for (int r = 0; r < R; r++)
    QT_UNROLL
    for (int v = 0; v < V; v++) sums[r][v] = f32x16{};
  const auto values = [&](int t) {
    const int group = D * TILE / S::P + t % TILE / S::P * D;
    return (const uint32_t*)tiles[t / TILE] + S::HEADER + group + channel;
  };
  const int whole = end / S::P * S::P;
#pragma GCC unroll 1
  for (int t = first; t < whole; t += S::P) {
    const uint32_t* words = values(t);
    QT_UNROLL
    for (int p = 0; p < S::P; p++) {
      // Loads a word again for each of its parts, which costs less than gcc's unpacking all parts
      // of all words first and spilling the sums.
      if (S::P > 1) asm volatile("" ::: "memory");
      QT_UNROLL
      for (int v = 0; v < V; v++) {
        const f32x16 value = S::part(load<u32x16>(words + v * LANES), p);
        QT_UNROLL
        for (int r = 0; r < R; r++) sums[r][v] += value * weights[r * SPLIT + t + p];
      }
    }
  }
#pragma GCC unroll 1
  for (int t = whole; t < end; t++)
    QT_UNROLL
    for (int v = 0; v < V; v++) {
      const u32x16 word = load<u32x16>(values(t) + v * LANES);
      f32x16 value{};
      QT_UNROLL
      for (int p = 0; p < S::P; p++)
        if (p == t % S::P) value = S::part(word, p);
      QT_UNROLL
      for (int r = 0; r < R; r++) sums[r][v] += value * weights[r * SPLIT + t];
    }
  QT_UNROLL
  for (int r = 0; r < R; r++)
    QT_UNROLL
    for (int v = 0; v < V; v++) store(out + r * D + channel + v * LANES, sums[r][v]);
}

template <int KIND, int R>
static void weigh_rows(const uint8_t* const* tiles, const float* weights, int first, int end, int D,
                       float* out) {
  int channel = 0;
  for (; channel + VALUE_VECTORS * LANES <= D; channel += VALUE_VECTORS * LANES)
    weigh_block<KIND, R, VALUE_VECTORS>(tiles, weights, first, end, D, channel, out);
  for (; channel < D; channel += LANES)
    weigh_block<KIND, R, 1>(tiles, weights, first, end, D, channel, out);
}

template <int KIND>
static void weigh(const uint8_t* const* tiles, const float* weights, int rows, int first, int end,
                  int D, float* out) {
  while (rows > 0) {
    const int done = rows >= 6 && VALUE_ROWS == 6 ? 6 : rows >= 3 ? 3 : 1;
    if (done == 6) weigh_rows<KIND, VALUE_ROWS>(tiles, weights, first, end, D, out);
    else if (done == 3) weigh_rows<KIND, 3>(tiles, weights, first, end, D, out);
    else weigh_rows<KIND, 1>(tiles, weights, first, end, D, out);
    rows -= done, weights += done * SPLIT, out += done * D;
  }
}

// One row's scores to weights, in place; returns {top, sum, what int8 values' minima add}.
struct RowWeights {
  float top, sum, minimum;
};
template <int KIND>
QT_NOINLINE static RowWeights soften(const uint8_t* const* tiles, int count, int64_t begin, int64_t position,
                         int64_t lowest, float query_sum, float* scores) {
  // Positions relative to `begin` fit 32 bits: out of a split's reach they are cut.
  const int high = int(std::min<int64_t>(position - begin, SPLIT));
  const int low = int(std::max<int64_t>(lowest - begin, 0));
  f32x16 tops = all(NEVER);
  for (int t = 0; t < count; t++) {
    f32x16 s = loadf(scores + t * TILE);
    if (KIND == KV_INT8) {
      const float* steps = (const float*)tiles[t];
      s = s * loadf(steps) + query_sum * loadf(steps + TILE);
    }
    const i32x16 number = lane_numbers() + t * TILE;
    s = (number <= high) & (number >= low) ? s : all(NEVER);
    store(scores + t * TILE, s);
    tops = max(tops, s);
  }
  const float top = highest(tops);
  if (top == NEVER) {
    std::memset(scores, 0, count * TILE * sizeof(float));
    return {top, 0, 0};
  }
  f32x16 total{}, minima{};
  for (int t = 0; t < count; t++) {
    const f32x16 s = loadf(scores + t * TILE);
    const auto seen = s != all(NEVER);
    f32x16 weight = seen ? exp(s - top) : f32x16{};
    total += weight;
    if (KIND == KV_INT8) {
      const float* steps = (const float*)tiles[t] + 2 * TILE;
      minima += seen ? weight * loadf(steps + TILE) : f32x16{};
      weight = seen ? weight * loadf(steps) : f32x16{};
    }
    store(scores + t * TILE, weight);
  }
  return {top, sum(total), KIND == KV_INT8 ? sum(minima) : 0.f};
}

struct Queries {
  alignas(64) float rows[ROWS * MAX_HEAD_DIM];  // scaled
  float sums[ROWS];                             // of a row, for the int8 keys' minima
};

template <int KIND>
QT_NOINLINE static void attend_split(const AttentionLayer& layer, const Item& item, const Queries& q, int split,
                         Partial& out) {
  const Span& span = layer.spans[item.span];
  const int D = int(layer.shape->head_dim), rows = item.tokens * item.heads;
  const int64_t position = span.context - span.length + item.first;  // of the first token
  const int64_t begin = int64_t(split) * SPLIT;
  const int end = int(std::min<int64_t>(SPLIT, position + item.tokens - begin));
  const auto lowest = [&](int token) {
    return layer.window ? std::max<int64_t>(0, position + token - layer.window + 1) : 0;
  };
  const int first = int(std::max<int64_t>(0, lowest(0) - begin)) / TILE * TILE;
  if (first >= end) {  // the window has left this split
    for (int r = 0; r < rows; r++) out.top[r] = NEVER, out.weight[r] = 0;
    std::memset(out.out, 0, rows * D * sizeof(float));
    return;
  }
  const Pages pages{layer.shape, layer.pages, layer.tables + item.span * layer.table_width,
                    item.kv_head};
  const uint8_t* tiles[SPLIT_TILES];
  for (int t = first / TILE; t * TILE < end; t++) tiles[t] = pages.tile(begin / TILE + t);
  const int skip = first / TILE, count = (end + TILE - 1) / TILE - skip;
  alignas(64) float scores[ROWS * SPLIT];
  score<KIND>(tiles + skip, count, q.rows, rows, D, scores + first);
  float minima[ROWS];
  for (int r = 0; r < rows; r++) {
    const int token = r / item.heads;
    const RowWeights w =
        soften<KIND>(tiles + skip, count, begin + first, position + token, lowest(token), q.sums[r],
                     scores + r * SPLIT + first);
    out.top[r] = w.top, out.weight[r] = w.sum, minima[r] = w.minimum;
  }
  weigh<KIND>(tiles, scores, rows, first, end, D, out.out);
  if (KIND == KV_INT8)
    for (int r = 0; r < rows; r++)
      for (int d = 0; d < D; d += LANES)
        store(out.out + r * D + d, loadf(out.out + r * D + d) + minima[r]);
}

// Not inlined, as its callers must get the same bits: of two products in a sum the compiler may fuse
// either one.
QT_NOINLINE static void join(Partial& into, const Partial& part, int rows, int D) {
  for (int r = 0; r < rows; r++) {
    const float top = std::max(into.top[r], part.top[r]);
    if (part.top[r] == NEVER) continue;
    f32x16 shift = all(0);
    shift[0] = into.top[r] - top, shift[1] = part.top[r] - top;
    const f32x16 decay = exp(shift);
    const f32x16 a = all(into.top[r] == NEVER ? 0 : decay[0]), b = all(decay[1]);
    into.top[r] = top;
    into.weight[r] = into.weight[r] * a[0] + part.weight[r] * b[0];
    for (int d = r * D; d < (r + 1) * D; d += LANES)
      store(into.out + d, loadf(into.out + d) * a + loadf(part.out + d) * b);
  }
}

static inline void clear(Partial& p, int rows, int D) {
  for (int r = 0; r < rows; r++) p.top[r] = NEVER, p.weight[r] = 0;
  std::memset(p.out, 0, rows * D * sizeof(float));
}

// Rows of queries and results: floats `stride` apart, heads side by side.
struct Rows {
  const float* queries;
  int64_t query_stride;
  float* out;
  int64_t out_stride;
};

static inline void load_queries(const AttentionLayer& layer, const Item& item, const Rows& rows,
                                Queries& q) {
  const int D = int(layer.shape->head_dim);
  const int64_t row = layer.spans[item.span].start + item.first;
  for (int r = 0; r < item.tokens * item.heads; r++) {
    const float* from = rows.queries + (row + r / item.heads) * rows.query_stride +
                        (item.head + r % item.heads) * D;
    f32x16 total{};
    for (int d = 0; d < D; d += LANES) {
      const f32x16 v = loadf(from + d) * layer.scale;
      store(q.rows + r * D + d, v);
      total += v;
    }
    q.sums[r] = sum(total);
  }
}

static inline void finish(const AttentionLayer& layer, const Item& item, const Partial& result,
                          const Rows& rows) {
  const int D = int(layer.shape->head_dim);
  const int64_t row = layer.spans[item.span].start + item.first;
  for (int r = 0; r < item.tokens * item.heads; r++) {
    float* to = rows.out + (row + r / item.heads) * rows.out_stride +
                (item.head + r % item.heads) * D;
    for (int d = 0; d < D; d += LANES)
      store(to + d, loadf(result.out + r * D + d) / result.weight[r]);
  }
}

// One entry of plan.work.
template <int KIND>
static void attend_unit(const AttentionLayer& layer, AttentionPlan& plan, int unit,
                        const Rows& rows) {
  const int number = unit / AttentionPlan::SPLITS_AT_MOST;
  const Item& item = plan.items[number];
  const int D = int(layer.shape->head_dim), count = item.tokens * item.heads;
  Queries q;
  load_queries(layer, item, rows, q);
  Partial result, part;
  clear(result, count, D);
  if (item.partials < 0) {
    for (int split = 0; split < item.splits; split++) {
      attend_split<KIND>(layer, item, q, split, part);
      join(result, part, count, D);
    }
    return finish(layer, item, result, rows);
  }
  const int split = unit % AttentionPlan::SPLITS_AT_MOST;
  attend_split<KIND>(layer, item, q, split, plan.partials[item.partials + split]);
  // Whoever ends an item's last split joins them all.
  if ((plan.finished[number].fetch_add(1, std::memory_order_acq_rel) + 1) % item.splits) return;
  for (int s = 0; s < item.splits; s++) join(result, plan.partials[item.partials + s], count, D);
  finish(layer, item, result, rows);
}

// A thread's part of one layer's attention; `next` is shared and starts at 0.
static inline void attend(const AttentionLayer& layer, AttentionPlan& plan, std::atomic<int>& next,
                          const Rows& rows) {
  const int units = int(plan.work.size());
  for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < units;) {
    const int unit = plan.work[i];
    if (layer.shape->kind == KV_FP32) attend_unit<KV_FP32>(layer, plan, unit, rows);
    else if (layer.shape->kind == KV_BF16) attend_unit<KV_BF16>(layer, plan, unit, rows);
    else attend_unit<KV_INT8>(layer, plan, unit, rows);
  }
}

}  // namespace qt
