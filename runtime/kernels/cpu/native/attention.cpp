#include "attention.h"

#include "attention_work.h"

namespace qt {
namespace {

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
  switch (layer.kv->shape.kind) {
    case KV_FP32: return run<KV_FP32>(layer, plan, unit, rows);
    case KV_BF16: return run<KV_BF16>(layer, plan, unit, rows);
    case KV_INT8: return run<KV_INT8>(layer, plan, unit, rows);
    case KV_FP8: return run<KV_FP8>(layer, plan, unit, rows);
    case KV_FP8_STATIC: return run<KV_FP8_STATIC>(layer, plan, unit, rows);
    case KV_K8V4: return run<KV_K8V4>(layer, plan, unit, rows);
    default: return run<KV_INT4>(layer, plan, unit, rows);
  }
}

}  // namespace qt
