// One layer's rows stored and seen, outside a step.
#include "attention.h"
#include "pool.h"

namespace qt {
namespace {


// What one thread does.
class Caller {
 public:
  Caller(const qt_layer_call& call, const AttentionLayer& layer, RowPlan& rows, AttentionPlan& plan)
      : call_(call), layer_(layer), rows_(rows), plan_(plan) {}

  void run(int thread, int count) {
    if (call_.keys) {
      store(thread, count);
      pool_barrier(thread);
    }
    const int64_t stride = call_.num_heads * layer_.kv->shape.head_dim;
    attend(layer_, plan_, next_, {call_.queries, stride, call_.out, stride, nullptr},
           [](Unit) {});
    if (!call_.keys || !layer_.kv->shape.form().has_tails()) return;
    pool_barrier(thread);
    const Range mine = share(int(call_.num_spans), thread, count);
    for (int span = mine.begin; span < mine.end; span++) keep_tail(layer_, span);
  }

 private:
  void store(int thread, int count) {
    const KvShape& shape = layer_.kv->shape;
    const NewRows rows = {call_.keys, call_.values, shape.kv_heads * shape.head_dim, nullptr};
    const int segments = int(rows_.segments.size());
    const Range mine = share(segments * int(shape.kv_heads), thread, count);
    for (int unit = mine.begin; unit < mine.end; unit++)
      store_segment(layer_, rows_.segments[unit % segments], unit / segments, rows);
  }

  const qt_layer_call& call_;
  const AttentionLayer& layer_;
  RowPlan& rows_;
  AttentionPlan& plan_;
  std::atomic<int> next_{0};
};

}  // namespace
}  // namespace qt

void qt_attend(const qt_layer_call* call) {
  const qt::KvShape& shape = call->kv->shape;
  const bool has_tails = shape.form().has_tails();
  qt::AttentionPlan plan;
  qt::RowPlan rows;
  plan_attention(plan, call->spans, int(call->num_spans), int(call->num_heads),
                 int(shape.kv_heads), has_tails, qt_pool_size());
  plan_rows(rows, call->spans, int(call->num_spans), has_tails,
            shape.kv_heads * shape.tail().layout().page_bytes);
  const qt::AttentionLayer layer(
      {call->spans, call->tables, call->table_width, call->tails, &rows}, call->kv, call->scale,
      call->window, call->softcap);
  qt::Caller caller(*call, layer, rows, plan);
  auto body = [&](int thread, int count) { caller.run(thread, count); };
  qt::pool_run(body);
}
