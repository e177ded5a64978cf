// Instructions of the matrix unit (AMX): 16 rows times 16 columns times 64 bytes of neighbours in one.
// Assembly, because an intrinsic's tile number cannot come from a template.
#pragma once

#include "tile_ops.h"

#if defined(QT_AMX)

namespace qt {

constexpr int TILE_BYTES = 64;  // of a row of a tile register

// Operand of ldtilecfg; Intel's manual, volume 1, chapter 18.
struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes_a_row[16];
  uint8_t rows[16];
};

QT_INLINE void configure_tiles(const TileConfig& config) {
  asm volatile("ldtilecfg %0" : : "m"(config));
}
// Tiles in use make every context switch save 8 KiB more.
QT_INLINE void release_tiles() { asm volatile("tilerelease"); }

template <int TILE>
QT_INLINE void load_tile(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
QT_INLINE void store_tile(void* p) {
  const int64_t stride = VECTOR_BYTES;
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
QT_INLINE void clear_tile() { asm volatile("tilezero %%tmm%c0" : : "i"(TILE)); }

// sum += A B of signed bytes.
template <int SUM, int A, int B>
QT_INLINE void multiply_tiles() {
  asm volatile("tdpbssd %%tmm%c0, %%tmm%c1, %%tmm%c2" : : "i"(B), "i"(A), "i"(SUM));
}
// The same with unsigned bytes in A.
template <int SUM, int A, int B>
QT_INLINE void multiply_unsigned_tiles() {
  asm volatile("tdpbusd %%tmm%c0, %%tmm%c1, %%tmm%c2" : : "i"(B), "i"(A), "i"(SUM));
}

}  // namespace qt

#endif
