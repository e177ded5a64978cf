#include "step.h"

#include <cstdlib>
#include <memory>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace qt {
namespace {

// Rows up to which every thread prepares all activations for itself: cheaper than a barrier.
constexpr int FEW_ROWS = 2;
constexpr size_t ALIGNMENT = 64;

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

class Buffer {
 public:
  template <class T>
  T* reserve(size_t count) {
    const size_t bytes = round_up(count * sizeof(T) + ALIGNMENT, ALIGNMENT);
    if (bytes > size_) {
      memory_.reset(static_cast<uint8_t*>(std::aligned_alloc(ALIGNMENT, bytes)));
      size_ = bytes;
    }
    return reinterpret_cast<T*>(memory_.get());
  }

 private:
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  std::unique_ptr<uint8_t, Free> memory_;
  size_t size_ = 0;
};

struct Workspace {
  Buffer residual, wide, heads, acts;
  Buffer own_acts[MAX_THREADS], own_row[MAX_THREADS];
  AttentionPlan plan;
  std::vector<std::atomic<int>> next;  // unit of attention, a counter a layer
  int64_t ticks[NUM_PHASES] = {};
};

int64_t clock_ticks() {
#if defined(__x86_64__)
  return int64_t(__rdtsc());
#else
  return 0;
#endif
}

void widen(const uint16_t* from, int count, float* to) {
  typedef uint16_t u16x16 __attribute__((vector_size(32)));
  int i = 0;
  for (; i + LANES <= count; i += LANES) {
    u16x16 half;
    std::memcpy(&half, from + i, sizeof half);
    store(to + i, (f32x16)(__builtin_convertvector(half, u32x16) << 16));
  }
  for (; i < count; i++) to[i] = from_bf16(from[i]);
}

// A step's constants and buffers, shared by its threads.
struct Step {
  const Model& model;
  const StepBatch& batch;
  Workspace& space;
  int rows, hidden, padded_hidden, qkv_width, mlp_width;
  float* residual;  // [rows][padded_hidden], zeros beyond hidden
  float* wide;      // [rows][qkv_width or 2 * mlp_width]
  float* heads;     // [rows][num_heads * head_dim]
};

// What one thread does in a step.
class Thread {
 public:
  Thread(const Step& step, int number, int count)
      : step_(step), number_(number), count_(count), mark_(clock_ticks()) {}

  void run() {
    embed();
    for (int i = 0; i < step_.model.num_layers; i++) layer(i);
    if (step_.batch.num_logits) logits();
  }

 private:
  void lap(Phase phase) {
    if (number_) return;
    const int64_t now = clock_ticks();
    step_.space.ticks[phase] += now - mark_;
    mark_ = now;
  }
  void meet(Phase ended) {
    lap(ended);
    pool_barrier(number_);
    lap(WAIT);
  }

  void embed() {
    const Model& m = step_.model;
    const Range mine = share(step_.rows, number_, count_);
    for (int row = mine.begin; row < mine.end; row++) {
      float* x = residual(row);
      const size_t from = size_t(step_.batch.token_ids[row]) * step_.hidden;
      if (m.embedding_is_bf16) {
        const uint16_t* e = static_cast<const uint16_t*>(m.embedding) + from;
        widen(e, step_.hidden, x);
      } else {
        std::memcpy(x, static_cast<const float*>(m.embedding) + from, step_.hidden * sizeof *x);
      }
      for (int i = step_.hidden; i < step_.padded_hidden; i++) x[i] = 0;
    }
    meet(EMBED);
  }

  void layer(int index) {
    const Layer& l = step_.model.layers[index];
    Acts acts = normed(*l.qkv, step_.rows, l.input_norm, [](int row) { return row; });
    project(*l.qkv, acts, step_.wide, step_.qkv_width);
    meet(QKV);
    rotate_and_store(l);
    meet(ROTATE);
    attend_all(l, index);
    meet(ATTEND);
    acts = put(*l.output, step_.rows, [&](int row, int, int) {
      return step_.heads + size_t(row) * step_.model.num_heads * step_.model.kv.head_dim;
    });
    add_to_residual(*l.output, acts);
    meet(OUTPUT);
    acts = normed(*l.gate_up, step_.rows, l.post_attention_norm, [](int row) { return row; });
    project(*l.gate_up, acts, step_.wide, 2 * step_.mlp_width);
    meet(GATE_UP);
    acts = put(*l.down, step_.rows, [&](int row, int first, int end) {
      return gated(row, first, end);
    });
    add_to_residual(*l.down, acts);
    meet(DOWN);
  }

  // Rows in the form w reads. make(row, first, end) gives a row, valid in columns [first, end).
  template <class Make>
  Acts put(const Linear& w, int rows, Make make) {
    if (rows <= FEW_ROWS) {
      const Acts acts =
          acts_at(w, rows, step_.space.own_acts[number_].reserve<uint8_t>(acts_bytes(w, rows)));
      put_part(acts, {0, rows}, {0, acts_groups(acts)}, make);
      lap(NORM);
      return acts;
    }
    const Acts acts = acts_at(w, rows, step_.space.acts.reserve<uint8_t>(0));
    if (acts.tiles >= 2 * count_) {
      // Whole tiles: rows of one tile share cache lines.
      const Range mine = share(acts.tiles, number_, count_);
      for (int tile = mine.begin; tile < mine.end; tile++)
        put_part(acts, row_tile(acts, tile), {0, acts_groups(acts)}, make);
    } else {
      put_part(acts, {0, rows}, share(acts_groups(acts), number_, count_), make);
    }
    meet(NORM);
    return acts;
  }

  template <class Make>
  void put_part(const Acts& acts, Range rows, Range groups, Make make) {
    if (groups.begin == groups.end) return;
    const int first = groups.begin * acts.group, end = std::min(groups.end * acts.group, acts.k);
    for (int row = rows.begin; row < rows.end; row++)
      acts_put(acts, row, make(row, first, end), groups.begin, groups.end);
  }

  // RMS norm (Zhang & Sennrich 2019, section 3) of rows source(row) of the residual stream.
  template <class Source>
  Acts normed(const Linear& w, int rows, const float* weight, Source source) {
    return put(w, rows, [&, weight](int row, int first, int end) {
      return norm_row(int(source(row)), weight, first, end);
    });
  }

  const float* norm_row(int row, const float* weight, int first, int end) {
    const float* x = residual(row);
    f32x16 squares{};
    for (int i = 0; i < step_.padded_hidden; i += LANES) {
      const f32x16 v = loadf(x + i);
      squares += v * v;
    }
    const float mean = sum(squares) / float(step_.hidden);
    const float inverse = 1.f / std::sqrt(mean + step_.model.norm_eps);
    float* out = own_row();
    for (int i = first / LANES * LANES; i < end; i += LANES)
      store(out + i, loadf(x + i) * inverse * loadf(weight + i));
    return out;
  }

  // SwiGLU (Shazeer 2020) of a row's gate and up projections.
  const float* gated(int row, int first, int end) {
    const float* gate = step_.wide + size_t(row) * 2 * step_.mlp_width;
    float* out = own_row();
    for (int i = first; i < end; i += LANES)
      store(out + i, silu(loadf(gate + i)) * loadf(gate + step_.mlp_width + i));
    return out;
  }

  void project(const Linear& w, const Acts& acts, float* out, int64_t stride) {
    const Range mine = share(linear_blocks(w), number_, count_);
    gemm(w, acts, mine.begin, mine.end, [&](int row, int column, const float* values, int count) {
      copy_columns(out + row * stride + column, values, count);
    });
  }

  void add_to_residual(const Linear& w, const Acts& acts) {
    const Range mine = share(linear_blocks(w), number_, count_);
    gemm(w, acts, mine.begin, mine.end, [&](int row, int column, const float* values, int count) {
      float* x = residual(row) + column;
      int i = 0;
      for (; i + LANES <= count; i += LANES) store(x + i, loadf(x + i) + loadf(values + i));
      for (; i < count; i++) x[i] += values[i];
    });
  }

  // Turns queries in place and stores turned keys and values. KV head by KV head, so that threads
  // seldom share a tile.
  void rotate_and_store(const Layer& l) {
    const KvShape& kv = step_.model.kv;
    const int D = int(kv.head_dim), num_heads = int(step_.model.num_heads);
    const int group = num_heads / int(kv.kv_heads);
    const Range mine = share(step_.rows * int(kv.kv_heads), number_, count_);
    for (int unit = mine.begin; unit < mine.end; unit++) {
      const int row = unit % step_.rows, head = unit / step_.rows;
      float* y = step_.wide + size_t(row) * step_.qkv_width;
      const int64_t position = step_.batch.positions[row], slot = step_.batch.slots[row];
      for (int h = head * group; h < (head + 1) * group; h++) rotate(y + h * D, position);
      float* key = y + (num_heads + head) * D;
      rotate(key, position);
      const int64_t block = slot / kv.block_size, offset = slot % kv.block_size;
      kv_store(kv, kv.tile(l.pages, block, offset, head), int(offset % TILE), key,
               key + kv.kv_heads * D);
    }
  }

  // Rotary embedding (Su et al. 2021, section 3.2), halves rotated.
  void rotate(float* x, int64_t position) const {
    const int half = int(step_.model.kv.head_dim) / 2;
    const float *cos = step_.model.cos + position * half, *sin = step_.model.sin + position * half;
    int i = 0;
    for (; i + LANES <= half; i += LANES) {
      const f32x16 a = loadf(x + i), b = loadf(x + i + half);
      const f32x16 c = loadf(cos + i), s = loadf(sin + i);
      store(x + i, a * c - b * s);
      store(x + i + half, b * c + a * s);
    }
    for (; i < half; i++) {
      const float a = x[i], b = x[i + half];
      x[i] = a * cos[i] - b * sin[i];
      x[i + half] = b * cos[i] + a * sin[i];
    }
  }

  void attend_all(const Layer& l, int index) {
    const StepBatch& b = step_.batch;
    const KvShape& kv = step_.model.kv;
    const AttentionLayer layer{&kv, l.pages, b.spans, b.block_tables, b.table_width, l.scale,
                               l.window};
    attend(layer, step_.space.plan, step_.space.next[index],
           {step_.wide, step_.qkv_width, step_.heads, step_.model.num_heads * kv.head_dim});
  }

  void logits() {
    const Model& m = step_.model;
    const StepBatch& b = step_.batch;
    const int rows = int(b.num_logits);
    if (!m.head) {
      const Range mine = share(rows, number_, count_);
      for (int row = mine.begin; row < mine.end; row++)
        std::memcpy(b.out + size_t(row) * step_.hidden,
                    norm_row(int(b.logit_rows[row]), m.norm, 0, step_.hidden),
                    step_.hidden * sizeof(float));
      return lap(HEAD);
    }
    const Acts acts = normed(*m.head, rows, m.norm, [&](int row) { return b.logit_rows[row]; });
    project(*m.head, acts, b.out, m.head->n);
    lap(HEAD);
  }

  float* residual(int row) const { return step_.residual + size_t(row) * step_.padded_hidden; }
  float* own_row() const { return step_.space.own_row[number_].reserve<float>(0); }

  const Step& step_;
  const int number_, count_;
  int64_t mark_;
};

// Memory for this step, taken by the caller so that the threads never allocate.
Step prepare(const Model& m, const StepBatch& b, Workspace& space, int num_threads) {
  const int rows = int(b.rows), hidden = int(m.hidden);
  const int padded = int(round_up(hidden, LANES));
  const int qkv = int((m.num_heads + 2 * m.kv.kv_heads) * m.kv.head_dim);
  const int mlp = int(m.intermediate);
  const size_t widest = std::max(qkv, 2 * mlp);
  size_t acts = m.head ? acts_bytes(*m.head, std::max<int>(rows, int(b.num_logits))) : 0;
  for (int i = 0; i < m.num_layers; i++)
    for (const Linear* w : {m.layers[i].qkv, m.layers[i].output, m.layers[i].gate_up, m.layers[i].down})
      acts = std::max(acts, acts_bytes(*w, rows));
  space.acts.reserve<uint8_t>(acts);
  for (int t = 0; t < num_threads; t++) {
    space.own_row[t].reserve<float>(std::max<size_t>(widest, padded) + LANES);
    if (std::min<int64_t>(rows, std::max<int64_t>(b.num_logits, 1)) <= FEW_ROWS)
      space.own_acts[t].reserve<uint8_t>(acts);
  }
  if (space.next.size() < size_t(m.num_layers)) {
    space.next = std::vector<std::atomic<int>>(m.num_layers);
  }
  for (auto& counter : space.next) counter.store(0, std::memory_order_relaxed);
  plan_attention(space.plan, b.spans, int(b.num_spans), int(m.num_heads), int(m.kv.kv_heads),
                 num_threads);
  return {m,
          b,
          space,
          rows,
          hidden,
          padded,
          qkv,
          mlp,
          space.residual.reserve<float>(size_t(rows) * padded),
          space.wide.reserve<float>(rows * widest + LANES),
          space.heads.reserve<float>(size_t(rows) * m.num_heads * m.kv.head_dim)};
}

}  // namespace
}  // namespace qt

void* qt_workspace_new() { return new qt::Workspace; }

void qt_workspace_free(void* workspace) { delete static_cast<qt::Workspace*>(workspace); }

void qt_workspace_ticks(const void* workspace, int64_t* ticks) {
  std::memcpy(ticks, static_cast<const qt::Workspace*>(workspace)->ticks,
              sizeof qt::Workspace::ticks);
}

void qt_step(const qt::Model* model, const qt::StepBatch* batch, void* workspace) {
  auto& space = *static_cast<qt::Workspace*>(workspace);
  const qt::Step step = qt::prepare(*model, *batch, space, qt_pool_size());
  auto body = [&](int thread, int count) { qt::Thread(step, thread, count).run(); };
  qt::pool_run(body);
}

void qt_kv_store(const qt::KvShape* shape, uint8_t* pages, const float* keys, const float* values,
                 const int64_t* slots, int64_t tokens) {
  for (int64_t i = 0; i < tokens; i++)
    for (int64_t head = 0; head < shape->kv_heads; head++) {
      const int64_t block = slots[i] / shape->block_size, offset = slots[i] % shape->block_size;
      const int64_t at = (i * shape->kv_heads + head) * shape->head_dim;
      qt::kv_store(*shape, shape->tile(pages, block, offset, head), int(offset % qt::TILE),
                   keys + at, values + at);
    }
}

void qt_attention(const qt::AttentionLayer* layer, int64_t num_spans, int64_t num_heads,
                  const float* queries, float* out) {
  qt::AttentionPlan plan;
  qt::plan_attention(plan, layer->spans, int(num_spans), int(num_heads),
                     int(layer->shape->kv_heads), qt_pool_size());
  std::atomic<int> next{0};
  const int64_t stride = num_heads * layer->shape->head_dim;
  auto body = [&](int, int) { qt::attend(*layer, plan, next, {queries, stride, out, stride}); };
  qt::pool_run(body);
}

int64_t qt_tile_bytes(const qt::KvShape* shape) { return int64_t(shape->tile_bytes()); }
