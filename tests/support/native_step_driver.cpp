// Runs native attention and whole steps over random shapes in buffers that end where they should, and
// compares attention with plain loops in double. For sanitizers: nothing of Python or torch is in
// the process.
#include <cmath>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "step.h"

using qt::KvShape;
using qt::Linear;

extern "C" {
int64_t qt_linear_layout(Linear*);
void qt_linear_pack(const Linear*, const void*, const void*, const void*, void*);
}

static uint64_t state = 1;

static uint32_t random_below(uint32_t limit) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return uint32_t(state >> 33) % limit;
}

static std::vector<float> random_floats(size_t count) {
  std::vector<float> x(count);
  for (float& v : x) v = (int(random_below(2001)) - 1000) / 1000.f;
  return x;
}

static uint8_t* aligned(size_t bytes) {
  void* p = nullptr;
  if (posix_memalign(&p, 64, bytes + !bytes)) abort();
  return static_cast<uint8_t*>(p);
}

// A batch of sequences on blocks of their own, in falling order.
struct Sequences {
  std::vector<qt::Span> spans;
  std::vector<int64_t> tables, tokens;
  int64_t width = 0, blocks = 0, rows = 0;

  Sequences(int count, bool decode, int64_t block_size) {
    for (int s = 0; s < count; s++) {
      const int64_t length = decode ? 1 : 1 + random_below(20);
      spans.push_back({rows, length, length + random_below(300)});
      rows += length;
      width = std::max(width, (spans[s].context + block_size - 1) / block_size);
    }
    blocks = count * width;
    for (int64_t i = 0; i < blocks; i++) tables.push_back(blocks - 1 - i);
    for (int s = 0; s < count; s++)
      for (int64_t i = 0; i < spans[s].length; i++) tokens.push_back(random_below(50));
  }
};

// A layer's pages.
struct Pages {
  qt::KvLayer layer = {};
  std::vector<uint8_t*> memory;
  std::vector<int64_t> sizes;
  std::vector<float> scales;

  Pages(const KvShape& shape, int64_t blocks, int64_t tails) : scales(shape.kv_heads, 1.f / 256) {
    const KvShape tail = shape.tail();
    layer = {shape, take(blocks * qt_block_bytes(&shape)), nullptr, qt_block_bytes(&tail),
             scales.data(), scales.data()};
    layer.tails = take(tails * layer.tail_stride);
    fill(255);  // NaN where nothing is stored
  }
  ~Pages() {
    for (uint8_t* p : memory) free(p);
  }
  uint8_t* take(int64_t bytes) {
    memory.push_back(aligned(size_t(bytes)));
    sizes.push_back(bytes);
    return memory.back();
  }
  void fill(int byte) {
    for (size_t i = 0; i < memory.size(); i++) std::memset(memory[i], byte, size_t(sizes[i]));
  }
};

// A page of tokens where a tail page becomes one, or else so many tiles.
static int64_t block_size_of(int64_t kind, int64_t tiles) {
  return KvShape{kind}.form().has_tails() ? qt::PAGE : qt::TILE * tiles;
}

// The largest error of attention, relative to 1.
static double attention_error(int64_t kind) {
  const int64_t D = 16 * (1 + random_below(9)), kv_heads = 1 + random_below(3);
  const int64_t heads = kv_heads * (1 + random_below(14)), block_size = block_size_of(kind, 1 + random_below(2));
  const KvShape shape = {kind, int64_t(random_below(2)), block_size, kv_heads, D};
  const Sequences batch(1 + int(random_below(5)), random_below(2), block_size);
  const size_t count = batch.spans.size();
  Pages pages(shape, batch.blocks, int64_t(count));
  std::vector<std::vector<float>> keys, values;
  std::vector<int64_t> tails;
  const int64_t window = random_below(2) ? 1 + random_below(200) : 0;
  const float scale = 0.1f;
  std::vector<float> new_keys, new_values;
  for (size_t s = 0; s < count; s++) {
    const qt::Span& span = batch.spans[s];
    keys.push_back(random_floats(span.context * kv_heads * D));
    values.push_back(random_floats(span.context * kv_heads * D));
    tails.push_back(int64_t(count - 1 - s));
    const int64_t before = span.first(), row = kv_heads * D;
    new_keys.insert(new_keys.end(), keys[s].begin() + before * row, keys[s].end());
    new_values.insert(new_values.end(), values[s].begin() + before * row, values[s].end());
    if (!before) continue;
    // What stands before the batch's rows, seen by nobody.
    const qt::Span first = {0, before, before};
    std::vector<float> queries(before * heads * D), out(queries.size());
    const qt_layer_call call = {&pages.layer, &first, &batch.tables[s * batch.width], &tails[s],
                                queries.data(), keys[s].data(), values[s].data(), out.data(),
                                1, batch.width, heads, 1, scale, 0};
    qt_attend(&call);
  }
  const std::vector<float> queries = random_floats(batch.rows * heads * D);
  std::vector<float> out(queries.size());
  const qt_layer_call call = {&pages.layer, batch.spans.data(), batch.tables.data(), tails.data(),
                              queries.data(), new_keys.data(), new_values.data(), out.data(),
                              int64_t(count), batch.width, heads, window, scale, 0};
  qt_attend(&call);
  double worst = 0;
  for (size_t s = 0; s < count; s++)
    for (int64_t i = 0; i < batch.spans[s].length; i++)
      for (int64_t h = 0; h < heads; h++) {
        const qt::Span& span = batch.spans[s];
        const int64_t position = span.first() + i, kv = h / (heads / kv_heads);
        const int64_t first = window && position >= window ? position - window + 1 : 0;
        const float* q = &queries[((span.start + i) * heads + h) * D];
        std::vector<double> sums(D);
        double total = 0;
        for (int64_t t = first; t <= position; t++) {
          double score = 0;
          for (int64_t d = 0; d < D; d++) score += q[d] * keys[s][(t * kv_heads + kv) * D + d];
          const double weight = std::exp(score * scale);
          total += weight;
          for (int64_t d = 0; d < D; d++) sums[d] += weight * values[s][(t * kv_heads + kv) * D + d];
        }
        for (int64_t d = 0; d < D; d++)
          worst = std::fmax(worst, std::fabs(sums[d] / total -
                                             out[((span.start + i) * heads + h) * D + d]));
      }
  return worst;
}

static Linear random_linear(int n, int k, std::vector<uint8_t*>& memory) {
  Linear w = {};
  w.n = n, w.k = k, w.bits = 8, w.group = 16, w.compute = qt::INT8;
  w.scale_type = qt::SCALE_FP32, w.scale_groups = 1;
  uint8_t* packed = aligned(size_t(qt_linear_layout(&w)));
  std::vector<uint8_t> codes(size_t(n) * k), zeros(n, 128);
  for (uint8_t& code : codes) code = uint8_t(random_below(256));
  const std::vector<float> scales(n, 0.001f);
  qt_linear_pack(&w, codes.data(), scales.data(), zeros.data(), packed);
  memory.push_back(packed);
  w.data = packed;
  return w;
}

// A step gives the same tokens and logits on one thread and on several.
static bool steps_agree(int64_t kind, bool decode) {
  const int heads = 6, kv_heads = 2, D = 16, hidden = 48, width = 96, vocab = 50, layers = 2;
  std::vector<uint8_t*> memory;
  const Linear qkv = random_linear((heads + 2 * kv_heads) * D, hidden, memory);
  const Linear output = random_linear(hidden, heads * D, memory);
  const Linear gate_up = random_linear(2 * width, hidden, memory);
  const Linear down = random_linear(hidden, width, memory);
  const Linear head = random_linear(vocab, hidden, memory);
  const std::vector<float> norm(hidden, 1.f), embedding = random_floats(size_t(vocab) * hidden);
  const std::vector<float> cos(400 * D / 2, 0.6f), sin(400 * D / 2, 0.8f);
  const int64_t block_size = block_size_of(kind, 1);
  const KvShape shape = {kind, qt::KV_BF16, block_size, kv_heads, D};
  const Sequences batch(1 + int(random_below(9)), decode, block_size);
  std::vector<int64_t> tails;
  for (size_t s = 0; s < batch.spans.size(); s++) tails.push_back(int64_t(s));
  std::vector<float> logits[2];
  std::vector<int64_t> tokens[2];
  for (int run = 0; run < 2; run++) {
    qt_pool_start(run ? 2 + int(random_below(3)) : 1);
    std::vector<qt::Layer> parts;
    std::vector<std::unique_ptr<Pages>> pages;
    for (int i = 0; i < layers; i++) {
      pages.emplace_back(new Pages(shape, batch.blocks, int64_t(batch.spans.size())));
      pages.back()->fill(0);
      parts.push_back({norm.data(), norm.data(), &qkv, &output, &gate_up, &down,
                       &pages.back()->layer, 0.25f, 0});
    }
    const qt::Model model = {parts.data(), embedding.data(), norm.data(), &head, cos.data(),
                             sin.data(), layers, hidden, width, heads, kv_heads, D, 0, 1e-5f};
    logits[run].resize(batch.rows * vocab), tokens[run].resize(batch.rows);
    std::vector<int64_t> rows;
    for (int64_t i = 0; i < batch.rows; i++) rows.push_back(i);
    qt::StepBatch step = {batch.tokens.data(), batch.spans.data(),
                          batch.tables.data(), tails.data(), rows.data(), logits[run].data(), nullptr, batch.rows, int64_t(batch.spans.size()), batch.width, batch.rows};
    void* workspace = qt_workspace_new();
    qt_step(&model, &step, workspace);
    std::vector<float> best(batch.rows);
    for (auto& p : pages) p->fill(0);  // a tail page has the last rows' page by now
    step.out = best.data(), step.likeliest = tokens[run].data();
    qt_step(&model, &step, workspace);
    qt_workspace_free(workspace);
    for (int64_t i = 0; i < batch.rows; i++)
      if (logits[run][i * vocab + tokens[run][i]] != best[i]) return false;
  }
  for (uint8_t* p : memory) free(p);
  return logits[0] == logits[1] && tokens[0] == tokens[1];
}

int main() {
  // What the forms cost.
  const double bounds[] = {1e-5, 1e-2, 2e-2, 0.1, 0.1, 0.15, 0.15};
  for (int64_t kind = 0; kind <= qt::KV_INT4; kind++)
    for (int round = 0; round < 8; round++) {
      qt_pool_start(1 + int(random_below(4)));
      const double error = attention_error(kind);
      if (!(error < bounds[kind])) return printf("kind %d: error %g\n", int(kind), error), 1;
      if (!steps_agree(kind, round % 2)) return printf("kind %d: steps differ\n", int(kind)), 1;
    }
  qt_pool_stop();
  puts("good");
}
