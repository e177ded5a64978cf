// Memory of a decoder's steps, taken by the caller of a step so that its threads never allocate.
#pragma once

#include "buffer.h"
#include "step.h"

namespace qt {

// The likeliest token of a row so far, and its logit; NaN once there was one.
struct Likeliest {
  float logit;
  int64_t token;
};

struct Workspace {
  Buffer residual, wide, heads, acts, gated_acts;
  Buffer own_acts[MAX_THREADS], own_rows[MAX_THREADS], own_likeliest[MAX_THREADS];
  AttentionPlan plan;
  RowPlan rows;
  std::vector<std::atomic<int>> next;  // unit of attention, a counter a layer
  int64_t ticks[NUM_PHASES] = {};
};

// A step's constants and buffers, shared by its threads.
struct Step {
  const Model& model;
  const StepBatch& batch;
  Workspace& space;
  int rows, hidden, padded_hidden, qkv_width, mlp_width;
  bool decode;      // every sequence has one row, and no item shares another's new token
  float* residual;  // [rows][padded_hidden], zeros beyond hidden
  float* wide;      // [rows][qkv_width]
  float* heads;     // [rows][num_heads * head_dim]
};

// Channels of the gated product that one thread makes at a time: whole groups of the activations
// that they become, and whole blocks of gate and up.
int gated_unit(const Linear& down);

// Buffers and the plan of attention for one step.
Step prepare(const Model& model, const StepBatch& batch, Workspace& space, int num_threads);

}  // namespace qt
