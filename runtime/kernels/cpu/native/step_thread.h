// What one thread does in a step: every layer, with barriers where it needs what others made.
#pragma once

#include "workspace.h"

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace qt {

inline int64_t clock_ticks() {
#if defined(__x86_64__)
  return int64_t(__rdtsc());
#else
  return 0;
#endif
}

inline void widen(const uint16_t* from, int count, float* to) {
  typedef uint16_t u16x16 __attribute__((vector_size(32)));
  int i = 0;
  for (; i + LANES <= count; i += LANES) {
    u16x16 half;
    std::memcpy(&half, from + i, sizeof half);
    store(to + i, (f32x16)(__builtin_convertvector(half, u32x16) << 16));
  }
  for (; i < count; i++) to[i] = from_bf16(from[i]);
}

// What one thread does in a step.
class Thread {
 public:
  Thread(const Step& step, int number, int count)
      : step_(step),
        number_(number),
        count_(count),
        rotary_{step.model.cos, step.model.sin},
        mark_(clock_ticks()) {}

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
    const AttentionLayer attention = attention_of(l);
    if (!step_.decode) {
      store_rows(attention);
      meet(ROTATE);
    }
    attend_all(attention, index);
    meet(ATTEND);
    keep_tails(attention);
    acts = put(*l.output, step_.rows, [&](int row, int, int) {
      return step_.heads + size_t(row) * step_.model.num_heads * step_.model.head_dim;
    });
    add_to_residual(*l.output, acts);
    meet(OUTPUT);
    acts = normed(*l.gate_up, step_.rows, l.post_attention_norm, [](int row) { return row; });
    acts = gated(*l.gate_up, acts, *l.down);
    meet(GATE_UP);
    add_to_residual(*l.down, acts);
    meet(DOWN);
  }

  // Rows in the form w reads. make(row, first, end) gives a row, valid in columns [first, end).
  template <class Make>
  Acts put(const Linear& w, int rows, Make make) {
    if (rows <= FEW_ROWS) {
      const Acts acts =
          acts_at(w, rows, step_.space.own_acts[number_].get<void>());
      put_part(acts, {0, rows}, {0, acts_groups(acts)}, make);
      lap(NORM);
      return acts;
    }
    const Acts acts = acts_at(w, rows, step_.space.acts.get<void>());
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
    float* out = own_rows();
    for (int i = first / LANES * LANES; i < end; i += LANES)
      store(out + i, loadf(x + i) * inverse * loadf(weight + i));
    return out;
  }

  // SwiGLU (Shazeer 2020) of the gate and up projections, as activations of `down`: a few channels at
  // a time, while they lie in the cache. w has blocks of gate and of up in turn.
  Acts gated(const Linear& w, const Acts& in, const Linear& down) {
    const Acts out = acts_at(down, step_.rows, step_.space.gated_acts.get<void>());
    const int unit = gated_unit(down), width = step_.mlp_width;
    const Range mine = share((width + unit - 1) / unit, number_, count_);
    float* product = own_rows();
    for (int first = mine.begin * unit; first < mine.end * unit; first += unit) {
      const int end = std::min(first + unit, width);
      gemm(w, in, first / BLOCK_COLUMNS * 2, end / BLOCK_COLUMNS * 2,
           [&](int row, int column, const float* values, int count) {
             const int block = column / BLOCK_COLUMNS, channel = block / 2 * BLOCK_COLUMNS - first;
             float* x = product + row * unit + channel;
             if (block % 2 == 0) copy_columns(x, values, count);
             else
               for (int i = 0; i < count; i += LANES)
                 store(x + i, silu(loadf(x + i)) * loadf(values + i));
           });
      const int group = first / out.group, last = (end + out.group - 1) / out.group;
      for (int row = 0; row < step_.rows; row++)
        acts_put_part(out, row, product + row * unit + group * out.group - first, group, last);
    }
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

  AttentionLayer attention_of(const Layer& l) const {
    const StepBatch& b = step_.batch;
    const int64_t* tables = b.block_tables + l.kv->group * b.num_spans * b.table_width;
    return {{b.spans, tables, b.table_width, b.tails, &step_.space.rows}, l.kv, l.scale, l.window,
            0};
  }
  NewRows new_rows() const {
    const Model& m = step_.model;
    float* keys = step_.wide + m.num_heads * m.head_dim;
    return {keys, keys + m.kv_heads * m.head_dim, step_.qkv_width, &rotary_};
  }

  // Turns keys and stores them with their values. KV head by KV head, so that threads seldom write to
  // neighbouring memory. In a decode step attention does it, one barrier less and the tile still in
  // its cache.
  void store_rows(const AttentionLayer& layer) {
    const std::vector<Segment>& segments = step_.space.rows.segments;
    const int count = int(segments.size());
    const Range mine = share(count * int(step_.model.kv_heads), number_, count_);
    for (int unit = mine.begin; unit < mine.end; unit++)
      store_segment(layer, segments[unit % count], unit / count, new_rows());
  }

  void attend_all(const AttentionLayer& layer, int index) {
    const Model& m = step_.model;
    AttentionPlan& plan = step_.space.plan;
    const AttentionRows rows{step_.wide, step_.qkv_width, step_.heads, m.num_heads * m.head_dim,
                             &rotary_};
    attend(layer, plan, step_.space.next[index], rows, [&](Unit unit) {
      const Item& item = plan.items[unit.item];
      // Only the last split has the new token.
      if (!step_.decode || (item.partials >= 0 && unit.split + 1 < item.splits)) return;
      store_segment(layer, step_.space.rows.segments[item.span], item.kv_head, new_rows());
    });
  }

  void keep_tails(const AttentionLayer& layer) {
    if (step_.decode || !layer.kv->shape.form().has_tails()) return;
    const Range mine = share(int(step_.batch.num_spans), number_, count_);
    for (int span = mine.begin; span < mine.end; span++) keep_tail(layer, span);
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
    if (b.likeliest) return choose(*m.head, acts);
    project(*m.head, acts, b.out, m.head->n);
    lap(HEAD);
  }

  // The likeliest token of each row, the lowest of equals, and its logit; NaN if any logit is.
  void choose(const Linear& head, const Acts& acts) {
    const StepBatch& b = step_.batch;
    Likeliest* best = step_.space.own_likeliest[number_].get<Likeliest>();
    for (int row = 0; row < b.num_logits; row++) best[row] = {NEVER, 0};
    const Range mine = share(linear_blocks(head), number_, count_);
    gemm(head, acts, mine.begin, mine.end, [&](int row, int column, const float* values, int count) {
      if (count == BLOCK_COLUMNS && all_at_most(values, best[row].logit)) return;
      for (int i = 0; i < count; i++) take(best[row], {values[i], column + i});
    });
    meet(HEAD);
    const Range rows = share(int(b.num_logits), number_, count_);
    for (int row = rows.begin; row < rows.end; row++) {
      Likeliest winner = {NEVER, 0};
      for (int t = 0; t < count_; t++)
        take(winner, step_.space.own_likeliest[t].get<Likeliest>()[row]);
      b.likeliest[row] = winner.token, b.out[row] = winner.logit;
    }
    lap(HEAD);
  }

  static void take(Likeliest& best, Likeliest other) {
    if (other.logit > best.logit || other.logit != other.logit) best = other;
  }

  // Of 32 values; false if one is NaN.
  static bool all_at_most(const float* values, float limit) {
    const f32x16 a = loadf(values), b = loadf(values + LANES);
    const i32x16 holds = (a <= limit) & (b <= limit);
    return fold(holds, [](auto x, auto y) { return x & y; });
  }

  float* residual(int row) const { return step_.residual + size_t(row) * step_.padded_hidden; }
  float* own_rows() const { return step_.space.own_rows[number_].get<float>(); }

  const Step& step_;
  const int number_, count_;
  const Rotary rotary_;
  int64_t mark_;
};

}  // namespace qt
