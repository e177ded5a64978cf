// Runs native linear layers over random shapes in buffers that end where they should, and compares
// with plain loops in double. For sanitizers: nothing of Python or torch is in the process.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "gemm.h"

using qt::Linear;

extern "C" {
int64_t qt_linear_layout(Linear*);
void qt_linear_pack(const Linear*, const void*, const void*, const void*, void*);
int64_t qt_linear_workspace(const Linear*, int64_t);
void qt_linear_run(const Linear*, const void*, int32_t, int64_t, void*, int32_t, int64_t, int64_t,
                   void*);
}

static uint64_t state = 1;

static uint32_t random_below(uint32_t limit) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return uint32_t(state >> 33) % limit;
}

template <class T>
static T* memory(size_t count) {
  void* p = nullptr;
  if (posix_memalign(&p, 64, count * sizeof(T) + !count)) abort();
  return static_cast<T*>(p);
}

static Linear random_layer(int compute) {
  Linear w = {};
  w.compute = compute;
  w.bits = random_below(2) ? 4 : 8;
  w.group = 8 * (1 + int(random_below(16)));
  w.n = 1 + int(random_below(100));
  w.scale_type = qt::SCALE_FP32;
  w.asymmetric = w.bits == 4 && random_below(2);
  const bool grouped = random_below(2);
  w.k = grouped ? w.group * (1 + int(random_below(5))) : 1 + int(random_below(300));
  w.scale_groups = grouped ? w.k / w.group : 1;
  return w;
}

// The largest error of a layer's results relative to what int8 activations may cost.
static double error_of(int compute, int rows) {
  Linear w = random_layer(compute);
  const int64_t size = qt_linear_layout(&w);
  if (!size) abort();
  const int scales_a_row = w.scale_groups, width = w.k / scales_a_row;
  uint8_t *codes = memory<uint8_t>(size_t(w.n) * w.k), *packed = memory<uint8_t>(size);
  uint8_t* zeros = memory<uint8_t>(size_t(w.n) * scales_a_row);
  float* scales = memory<float>(size_t(w.n) * scales_a_row);
  float *x = memory<float>(size_t(rows) * w.k), *out = memory<float>(size_t(rows) * w.n);
  for (int i = 0; i < w.n * w.k; i++) codes[i] = uint8_t(random_below(1u << w.bits));
  for (int i = 0; i < w.n * scales_a_row; i++) {
    zeros[i] = uint8_t(w.asymmetric ? random_below(16) : 1u << (w.bits - 1));
    scales[i] = 1 + random_below(100) / 100.f;
  }
  for (int i = 0; i < rows * w.k; i++) x[i] = (int(random_below(256)) - 128) / 64.f;
  qt_linear_pack(&w, codes, scales, zeros, packed);
  w.data = packed;
  uint8_t* workspace = memory<uint8_t>(qt_linear_workspace(&w, rows));
  qt_linear_run(&w, x, 0, w.k, out, 0, w.n, rows, workspace);
  double worst = 0;
  for (int r = 0; r < rows; r++)
    for (int n = 0; n < w.n; n++) {
      double sum = 0, magnitude = 1e-9;
      for (int k = 0; k < w.k; k++) {
        const size_t at = size_t(n) * scales_a_row + k / width;
        const double weight = scales[at] * (codes[size_t(n) * w.k + k] - zeros[at]);
        sum += weight * x[size_t(r) * w.k + k];
        magnitude += fabs(weight) * (compute == qt::INT8 ? 2 / 127. : 1e-5);
      }
      worst = fmax(worst, fabs(sum - out[size_t(r) * w.n + n]) / magnitude);
    }
  free(codes), free(packed), free(zeros), free(scales), free(x), free(out), free(workspace);
  return worst;
}

int main() {
  const int rows[] = {1, 2, 3, 5, 6, 7, 11, 12, 13, 25, 385};
  for (int compute = 0; compute < 3; compute++)
    for (int count : rows)
      for (int round = 0; round < 4; round++) {
        qt_pool_start(1 + int(random_below(4)));
        const double error = error_of(compute, count);
        if (error > 1) {
          printf("compute %d, %d rows: %g times the error there may be\n", compute, count, error);
          return 1;
        }
      }
  qt_pool_stop();
  puts("good");
}
