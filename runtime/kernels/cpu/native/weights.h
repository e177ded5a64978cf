// Codes as numbers, for activations that are exact: code - 8 or code - 128, which bfloat16 and float
// hold exactly. The scale follows once a group.
#pragma once

#include "tiles.h"

namespace qt {

constexpr int zero_of(int bits) { return bits == 4 ? 8 : 128; }

// Bytes of a block's steps for 8 neighbours in k.
constexpr int steps_of_8(int bits) { return bits * STEP_BYTES / 4; }

// Weight k + J (J < 8) of WIDTH columns, without scale; `steps` is at k.
template <int BITS, int J>
QT_INLINE vf weight(const uint8_t* steps, int vector) {
  const uint8_t* p = steps + vector * VECTOR_BYTES;
  if (BITS == 4) {
    const vu word = load_vector<vu>(p) >> (J % 4 * 8 + J / 4 * 4);
#if defined(QT_AVX512)
    const vf numbers = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    return _mm512_permutexvar_ps((__m512i)word, numbers);
#else
    return to_float((vi)(word & 15u) - 8);
#endif
  }
  if (BITS == 8) {
    const vu word = load_vector<vu>(p + J / 4 * STEP_BYTES);
    return to_float((vi)(word >> (J % 4 * 8) & 255u) - 128);
  }
  if (BITS == 16) {
    // Of four neighbours, one step has 0 and 2, the next 1 and 3.
    const vu word = load_vector<vu>(p + (J / 4 * 2 + J % 2) * STEP_BYTES);
    return (vf)(J % 4 < 2 ? word << 16 : word & 0xffff0000u);
  }
  return load_vector<vf>(p + J * STEP_BYTES);
}

// Adds a group's sums to the results. The zero that differs from zero_of is taken off here.
template <int BITS, int ROWS>
QT_INLINE void add_group(const Linear& w, const Metadata& meta, int group, int first,
                         const vf (&sums)[ROWS][tile_vectors(ROWS)], const float* x_sums, float* out) {
  constexpr int VECTORS = tile_vectors(ROWS);
  QT_UNROLL
  for (int v = 0; v < VECTORS; v++) {
    vf scale = spread(1.f);
    vf offset = vf{};
    if (BITS < 16) scale = meta.scales(group, first + v);
    if (BITS == 4) offset = to_float(zero_of(BITS) - meta.zeros(group, first + v));
    QT_UNROLL
    for (int r = 0; r < ROWS; r++) {
      float* to = out + r * BLOCK_COLUMNS + (first + v) * WIDTH;
      vf sum = sums[r][v];
      if (BITS == 4 && w.asymmetric) sum = multiply_add(offset, spread(x_sums[r]), sum);
      store_vector(to, multiply_add(sum, scale, load_vector<vf>(to)));
    }
  }
}

}  // namespace qt
