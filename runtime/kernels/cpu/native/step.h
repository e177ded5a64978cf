// One step of the whole decoder in one call: every layer, over the rows of a ragged batch.
//
// All threads run the same function and meet at barriers, five a layer for one or two rows, eight for
// a decode step of more, nine with prompts: a region per operation would cost more than the small
// operations of a decode step. The structs are mirrored, field by
// field, in qtool.runtime.kernels.cpu.step, which fills them from the one model definition.
#pragma once

#include "attention.h"
#include "gemm.h"

namespace qt {

struct Layer {
  const float* input_norm;           // [hidden], zeros up to a multiple of 16
  const float* post_attention_norm;  // the same
  const Linear* qkv;
  const Linear* output;
  const Linear* gate_up;  // a block of 32 columns of the gate, its 32 of up, the next of the gate
  const Linear* down;
  const KvLayer* kv;  // this layer's part of the cache; kv_pages.h
  float scale;        // of attention scores
  int32_t window;     // in tokens; 0: none
};

struct Model {
  const Layer* layers;
  const void* embedding;  // [vocab][hidden]
  const float* norm;      // [hidden], zeros up to a multiple of 16
  const Linear* head;     // or null: the step gives normed rows instead of logits
  const float* cos;       // [positions][head_dim / 2]
  const float* sin;
  int64_t num_layers, hidden, intermediate, num_heads, kv_heads, head_dim;
  int64_t embedding_is_bf16;
  float norm_eps;
};

struct StepBatch {
  const int64_t* token_ids;     // [rows]
  const Span* spans;            // [num_spans], rows in order
  const int64_t* block_tables;  // [groups of layers][num_spans][table_width]
  const int64_t* tails;         // [num_spans]: tail pages; or null
  const int64_t* logit_rows;   // [num_logits]
  float* out;           // [num_logits][vocab], or [num_logits][hidden] without a head
  int64_t* likeliest;   // null, or [num_logits]: tokens instead of logits; out is [num_logits] then
  int64_t rows, num_spans, table_width, num_logits;
};

// Rows up to which every thread prepares all activations for itself: cheaper than a barrier.
constexpr int FEW_ROWS = 2;

// Where the time of a step went, in clock ticks of thread 0, added up over steps.
enum Phase { EMBED, NORM, QKV, ROTATE, ATTEND, OUTPUT, GATE_UP, DOWN, HEAD, WAIT, NUM_PHASES };

}  // namespace qt

// Buffers of one decoder; they grow to the largest step seen. One step at a time may use them.
QT_API void* qt_workspace_new();
QT_API void qt_workspace_free(void* workspace);
// Ticks of each Phase since the workspace was made.
QT_API void qt_workspace_ticks(const void* workspace, int64_t* ticks);

QT_API void qt_step(const qt::Model* model, const qt::StepBatch* batch, void* workspace);
