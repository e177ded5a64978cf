#include "attention_rows.h"

namespace qt {

void store_segment(const AttentionLayer& layer, const Segment& segment, int64_t head,
                   const NewRows& rows) {
  const KvLayer& kv = *layer.kv;
  const bool has_tails = kv.shape.form().has_tails();
  const int D = int(kv.shape.head_dim);
  KvLayer exact = kv;
  exact.shape = kv.shape.tail();
  for (int i = 0; i < segment.count; i++) {
    const int64_t position = segment.position + i, at = (segment.row + i) * rows.stride + head * D;
    float* key = rows.keys + at;
    if (rows.rotary) rotate(*rows.rotary, D, position, key);
    const int lane = int(position % TILE);
    if (has_tails) {
      uint8_t* page = layer.exact_page(segment.span, position, head);
      kv_store(exact, head, layer.exact_at.tile(page, position % PAGE), lane, key, rows.values + at);
    } else {
      kv_store(kv, head, layer.tile(segment.span, position, head), lane, key, rows.values + at);
    }
  }
  const int64_t end = segment.position + segment.count;
  if (has_tails && end % PAGE == 0)
    kv_seal(kv.shape, layer.page(segment.span, end - 1, head),
            layer.exact_page(segment.span, end - 1, head));
}

void keep_tail(const AttentionLayer& layer, int span) {
  const Span& s = layer.spans[span];
  if (s.context % PAGE == 0 || s.first() / PAGE == s.context / PAGE) return;
  const PageLayout& at = layer.exact_at;
  std::memcpy(layer.exact_page(span, s.first(), 0), layer.exact_page(span, s.context - 1, 0),
              at.kv_heads * at.page_bytes);
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
