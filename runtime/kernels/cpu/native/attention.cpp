#include "attention.h"

#include "attention_matrix.h"
#include "pool.h"
#include "softmax.h"

namespace qt {
namespace {

struct Queries {
  alignas(64) float rows[ROWS * ROW_STRIDE];  // items: scaled floats, or pairs of integers
  IntegerRow integers[ROWS];
#if defined(QT_AMX)
  Planes planes;
#endif
};

void put_float_row(const float* x, int D, float scale, float* items) {
  for (int d = 0; d < D; d += WIDTH) store_vector(items + d, load_vector<vf>(x + d) * scale);
}

IntegerRow put_integer_row(const float* x, int D, float scale, float* items) {
  vf most{}, nothing{};
  for (int d = 0; d < D; d += WIDTH) {
    const vf v = load_vector<vf>(x + d);
    most = max(most, max(v, -v));
    nothing += v * 0.f;
  }
  // `nothing` is not finite if an element is not: then no score is.
  const float largest = highest(most);
  const float inverse = largest > 1e-30f && largest < 3e38f ? INTEGER_TOP / largest : 0;
  vi integers{};
  for (int d = 0; d < D; d += WIDTH) {
    const vi integer = to_integer(load_vector<vf>(x + d) * inverse);
    store_pairs(items, d, integer);
    integers += integer;
  }
  return {largest * (scale / INTEGER_TOP) + sum(nothing), sum(integers)};
}

// One item's share of a layer.
template <int KIND>
class Work {
 public:
  Work(const AttentionLayer& layer, const Item& item, const AttentionRows& rows)
      : layer_(layer),
        item_(item),
        rows_(rows),
        D_(int(layer.shape->head_dim)),
        count_(item.tokens * item.heads),
        position_(layer.spans[item.span].context - layer.spans[item.span].length + item.first),
        by_matrix_(KIND == KV_INT8 && matrix_unit_attends(*layer.shape, count_)) {
#if defined(QT_AMX)
    if (by_matrix_) fetch(first_split());
#endif
    load_queries();
  }

  // The first split that a row's window reaches.
  int first_split() const { return int(lowest(0) / SPLIT); }

  void split(int number, Partial out) const {
    const int64_t start = int64_t(number) * SPLIT;
    const int begin = int(std::max<int64_t>(0, lowest(0) - start)) / TILE * TILE;
    const int end = int(std::min<int64_t>(SPLIT, position_ + item_.tokens - start));
    if (begin >= end) {  // the window has left this split
      for (int r = 0; r < count_; r++) out.top[r] = NEVER;
      return;
    }
    const uint8_t* tiles[SPLIT_TILES] = {};
    for (int t = begin / TILE; t * TILE < end; t++)
      tiles[t] = layer_.tile(item_.span, start + t * TILE, item_.kv_head);
    alignas(64) float scores[ROWS * ROW_STRIDE];
    RowWeights weights[ROWS];
    const Part part = {tiles, start, begin, end};
    float* items = scores + begin / Stored<KIND>::PER_ITEM;
#if defined(QT_AMX)
    if (by_matrix_) {
      MatrixValues values;
      multiply_keys(part, D_, count_, queries_.planes, scores + begin);
      copy_values(part, D_, values);
      fetch(number + 1);
      soften_rows(part, scores, weights);
      multiply_values(part, D_, count_, items, values, out.out);
      return put_result(weights, out);
    }
#endif
    multiply<KIND>(find_keys<KIND>(part, D_), count_, queries_.rows, scores + begin);
    soften_rows(part, scores, weights);
    multiply<KIND>(find_values<KIND>(part, D_), count_, items, out.out);
    put_result(weights, out);
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

  void load_queries() {
    for (int r = 0; r < count_; r++) {
      const float* x = rows_.queries + row(r) * rows_.query_stride + head(r) * D_;
      alignas(64) float turned[MAX_HEAD_DIM];
      if (rows_.rotary) {
        std::memcpy(turned, x, D_ * sizeof(float));
        rotate(*rows_.rotary, D_, position_ + r / item_.heads, turned);
        x = turned;
      }
      float* items = queries_.rows + r * ROW_STRIDE;
      if constexpr (KIND == KV_INT8)
        queries_.integers[r] = put_integer_row(x, D_, layer_.scale, items);
      else
        put_float_row(x, D_, layer_.scale, items);
#if defined(QT_AMX)
      if (by_matrix_) split_row(items, D_, queries_.planes.high[r], queries_.planes.low[r]);
#endif
    }
  }

#if defined(QT_AMX)
  // The keys of a split, if there are any, ahead of their product.
  void fetch(int split) const {
    const int64_t start = int64_t(split) * SPLIT;
    const int64_t end = std::min(start + SPLIT, position_ + item_.tokens);
    for (int64_t t = start; t < end; t += TILE)
      fetch_keys(layer_.tile(item_.span, t, item_.kv_head), D_);
  }
#endif

  Seen seen(int r, int64_t start) const {
    const int token = r / item_.heads;
    return {int(std::max<int64_t>(lowest(token) - start, 0)),
            int(std::min<int64_t>(position_ + token - start, SPLIT))};
  }

  // Scores, in place to items of weights.
  void soften_rows(const Part& part, float* scores, RowWeights* weights) const {
    const int last = part.last();
    if constexpr (KIND == KV_INT8) {
      Highest tops[ROWS];
      for (int r = 0; r < count_; r++)
        tops[r] = score_int8(part.tiles, seen(r, part.start), part.begin, last,
                             queries_.integers[r], scores + r * ROW_STRIDE);
      for (int r = 0; r < count_; r++)
        weights[r] = soften_int8(part.tiles, seen(r, part.start), part.begin, last, tops[r],
                                 scores + r * ROW_STRIDE);
    } else {
      for (int r = 0; r < count_; r++)
        weights[r] = soften(seen(r, part.start), part.begin, last, scores + r * ROW_STRIDE);
    }
  }

  void put_result(const RowWeights* weights, Partial out) const {
    for (int r = 0; r < count_; r++) {
      out.top[r] = weights[r].top, out.weight[r] = weights[r].sum;
      if constexpr (KIND == KV_INT8)
        for (int d = 0; d < D_; d += WIDTH) {
          float* at = out.out + r * ROW_STRIDE + d;
          store_vector(at, multiply_add(to_float(load_vector<vi>(at)), spread(weights[r].scale),
                                        spread(weights[r].middle)));
        }
    }
  }

  const AttentionLayer& layer_;
  const Item& item_;
  const AttentionRows& rows_;
  const int D_, count_;
  const int64_t position_;  // of the first token
  const bool by_matrix_;
  Queries queries_;
};

template <int KIND>
void run(const AttentionLayer& layer, AttentionPlan& plan, Unit unit, const AttentionRows& rows) {
  const Item& item = plan.items[unit.item];
  const Work<KIND> work(layer, item, rows);
  if (item.partials < 0) {
    OwnPartial own, next;
    const Partial result = own.view(), part = next.view();
    int split = work.first_split();
    work.split(split, result);
    while (++split < item.splits) {
      work.split(split, part);
      work.join(result, part);
    }
    return work.finish(result);
  }
  work.split(unit.split, plan.partial(item.partials + unit.split));
  // Whoever ends an item's last split joins them all.
  const int ended = plan.finished[unit.item].fetch_add(1, std::memory_order_acq_rel) + 1;
  if (ended % item.splits) return;
  int split = work.first_split();
  const Partial first = plan.partial(item.partials + split);
  while (++split < item.splits) work.join(first, plan.partial(item.partials + split));
  work.finish(first);
}

}  // namespace

#if defined(QT_AMX)

AttentionUnit::AttentionUnit(const KvShape& shape, int most_rows)
    : used_(matrix_unit_attends(shape, most_rows)) {
  if (!used_) return;
  TileConfig config = {};
  config.palette = 1;
  for (int tile = 0; tile < 8; tile++)
    config.rows[tile] = MATRIX_ROWS, config.bytes_a_row[tile] = TILE_BYTES;
  configure_tiles(config);
}

AttentionUnit::~AttentionUnit() {
  if (used_) release_tiles();
}

#else

AttentionUnit::AttentionUnit(const KvShape&, int) : used_(false) {}

AttentionUnit::~AttentionUnit() = default;

#endif

void attend_unit(const AttentionLayer& layer, AttentionPlan& plan, Unit unit,
                 const AttentionRows& rows) {
  if (layer.shape->kind == KV_FP32) run<KV_FP32>(layer, plan, unit, rows);
  else if (layer.shape->kind == KV_BF16) run<KV_BF16>(layer, plan, unit, rows);
  else run<KV_INT8>(layer, plan, unit, rows);
}

void rotate(const Rotary& rotary, int head_dim, int64_t position, float* x) {
  const int half = head_dim / 2;
  const float *cos = rotary.cos + position * half, *sin = rotary.sin + position * half;
  int i = 0;
  for (; i + WIDTH <= half; i += WIDTH) {
    const vf a = load_vector<vf>(x + i), b = load_vector<vf>(x + i + half);
    const vf c = load_vector<vf>(cos + i), s = load_vector<vf>(sin + i);
    store_vector(x + i, a * c - b * s);
    store_vector(x + i + half, b * c + a * s);
  }
  for (; i < half; i++) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i] + a * sin[i];
  }
}

}  // namespace qt

void qt_attention(const qt::AttentionLayer* layer, int64_t num_spans, int64_t num_heads,
                  const float* queries, float* out) {
  qt::AttentionPlan plan;
  qt::plan_attention(plan, layer->spans, int(num_spans), int(num_heads),
                     int(layer->shape->kv_heads), qt_pool_size());
  std::atomic<int> next{0};
  const int64_t stride = num_heads * layer->shape->head_dim;
  const qt::AttentionRows rows = {queries, stride, out, stride, nullptr};
  auto body = [&](int, int) { qt::attend(*layer, plan, next, rows, [](qt::Unit) {}); };
  qt::pool_run(body);
}
