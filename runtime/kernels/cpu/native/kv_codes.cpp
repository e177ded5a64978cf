#include "kv_codes.h"

namespace qt {
namespace {

constexpr float HALF_MAX = 65504.f, HALF_TINY = 0x1p-24f;

// As torch.clamp: NaN stays NaN.
float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

uint16_t scale_of(float x) { return to_half(clamp(x, HALF_TINY, HALF_MAX)); }

struct Bounds {
  float low, high;
};

Bounds bounds(const float* x, int n) {
  f32x16 high = loadf(x), low = high;
  i32x16 unknown{};
  for (int i = 0; i < n; i += LANES) {
    const f32x16 v = loadf(x + i);
    high = max(high, v);
    low = -max(-low, -v);
    unknown |= v != v;
  }
  if (fold(unknown, [](auto a, auto b) { return a | b; })) return {NAN, NAN};
  return {-highest(-low), highest(high)};
}

}  // namespace

uint16_t symmetric_scale(const float* x, int n, float top) {
  const Bounds b = bounds(x, n);
  return scale_of((b.high > -b.low ? b.high : -b.low) / top);
}

HalfGrid asymmetric_grid(float low, float high) {
  const uint16_t minimum = to_half(clamp(low, -HALF_MAX, HALF_MAX));
  return {scale_of((high - from_half(minimum)) / CODES_4BIT), minimum};
}

HalfGrid asymmetric_grid(const float* x, int n) {
  const Bounds b = bounds(x, n);
  return asymmetric_grid(b.low, b.high);
}

}  // namespace qt
