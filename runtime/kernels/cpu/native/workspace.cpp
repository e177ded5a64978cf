#include "workspace.h"

#include <numeric>

namespace qt {
namespace {

size_t padded(size_t n) { return (n + LANES - 1) / LANES * LANES; }

void reserve_acts(const Model& m, const StepBatch& b, Workspace& space, int num_threads) {
  const int rows = int(b.rows);
  size_t acts = m.head ? acts_bytes(*m.head, std::max<int>(rows, int(b.num_logits))) : 0;
  size_t gated = 0, unit = 0;
  for (int i = 0; i < m.num_layers; i++) {
    const Layer& l = m.layers[i];
    for (const Linear* w : {l.qkv, l.output, l.gate_up}) acts = std::max(acts, acts_bytes(*w, rows));
    gated = std::max(gated, acts_bytes(*l.down, rows));
    unit = std::max<size_t>(unit, gated_unit(*l.down));
  }
  space.acts.reserve<uint8_t>(acts);
  space.gated_acts.reserve<uint8_t>(gated);
  const bool few = std::min<int64_t>(rows, std::max<int64_t>(b.num_logits, 1)) <= FEW_ROWS;
  for (int t = 0; t < num_threads; t++) {
    space.own_rows[t].reserve<float>(std::max(padded(m.hidden) + LANES, rows * unit));
    if (few) space.own_acts[t].reserve<uint8_t>(acts);
    if (b.likeliest) space.own_likeliest[t].reserve<Likeliest>(b.num_logits);
  }
}

bool is_decode(const Model& m, const StepBatch& b) {
  return b.num_spans == b.rows && m.num_heads / m.kv_heads <= ROWS;
}

// Cuts rows and attention into work.
void plan(const Model& m, const StepBatch& b, Workspace& space, int num_threads) {
  size_t tail_bytes = 0;
  for (int i = 0; i < m.num_layers; i++) {
    const KvShape& shape = m.layers[i].kv->shape;
    if (shape.form().has_tails()) tail_bytes = m.kv_heads * shape.tail().layout().page_bytes;
  }
  const int spans = int(b.num_spans);
  plan_attention(space.plan, b.spans, spans, int(m.num_heads), int(m.kv_heads), tail_bytes > 0,
                 num_threads);
  plan_rows(space.rows, b.spans, spans, tail_bytes > 0, tail_bytes);
}

}  // namespace

int gated_unit(const Linear& down) { return std::lcm(down.group, BLOCK_COLUMNS); }

Step prepare(const Model& m, const StepBatch& b, Workspace& space, int num_threads) {
  const size_t rows = size_t(b.rows), hidden = padded(m.hidden);
  const size_t qkv = (m.num_heads + 2 * m.kv_heads) * m.head_dim;
  reserve_acts(m, b, space, num_threads);
  if (space.next.size() < size_t(m.num_layers))
    space.next = std::vector<std::atomic<int>>(m.num_layers);
  for (auto& counter : space.next) counter.store(0, std::memory_order_relaxed);
  plan(m, b, space, num_threads);
  return {m,
          b,
          space,
          int(rows),
          int(m.hidden),
          int(hidden),
          int(qkv),
          int(m.intermediate),
          is_decode(m, b),
          space.residual.reserve<float>(rows * hidden),
          space.wide.reserve<float>(rows * qkv),
          space.heads.reserve<float>(rows * m.num_heads * m.head_dim)};
}

}  // namespace qt
