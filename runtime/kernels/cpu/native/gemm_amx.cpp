// The matrix unit (AMX): 16 rows times 16 columns times 64 neighbours in k in one instruction.
//
// Integer sums inside a group and the same additions across groups as in gemm_int8.cpp: the same
// bits. Weights become int8 once for a panel of rows; zeros are taken off there.
#include "amx.h"
#include "tiles.h"

#if defined(QT_AMX)

#include <sys/syscall.h>
#include <unistd.h>

#endif

namespace qt {

#if defined(QT_AMX)

namespace {

constexpr int FEWEST_ROWS = 4;
constexpr int SMALLEST_GROUP = 32;

// Linux gives the state of tile registers to processes that ask; threads and children inherit it.
bool ask_for_tiles() {
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

// A group is cut into even pieces of at most a tile's width, multiples of 4 because groups are of 8.
int pieces_of(int group) { return (group + TILE_BYTES - 1) / TILE_BYTES; }

// Groups multiplied before their sums are scaled, 16 KiB of products at most. Multiplying and scaling
// hardly overlap anyway: they share a port.
constexpr int GROUPS_A_RUN = 8;

// Products of one group, each half of the block's columns by itself.
typedef int32_t GroupProducts[2][MATRIX_ROWS * WIDTH];

// Numbers of tile registers.
enum { LEFT, RIGHT, LEFT_CODES, RIGHT_CODES, ROWS };

QT_INLINE void multiply_group(const uint8_t* x, const uint8_t* codes, int group,
                              GroupProducts& out) {
  const int pieces = pieces_of(group), width = group / pieces;
  clear_tile<LEFT>();
  clear_tile<RIGHT>();
  for (int i = 0; i < pieces; i++, x += width, codes += width / 4 * STEP_BYTES) {
    load_tile<ROWS>(x, group);
    load_tile<LEFT_CODES>(codes, STEP_BYTES);
    multiply_tiles<LEFT, ROWS, LEFT_CODES>();
    load_tile<RIGHT_CODES>(codes + VECTOR_BYTES, STEP_BYTES);
    multiply_tiles<RIGHT, ROWS, RIGHT_CODES>();
  }
  store_tile<LEFT>(out[0]);
  store_tile<RIGHT>(out[1]);
}

// Groups of a tile of rows whose products are there to be scaled.
struct Run {
  const GroupProducts* products;
  const float *scales, *x_scales;
  int groups, rows;
};

// out += products times scales, for COUNT rows from `first`.
template <int COUNT>
QT_NOINLINE void add_rows(const Run& run, int first, float* out) {
  const float *scales = run.scales, *x_scales = run.x_scales + first;
  vf sums[COUNT][2];
  out += first * BLOCK_COLUMNS;
  QT_UNROLL
  for (int r = 0; r < COUNT; r++)
    QT_UNROLL
    for (int v = 0; v < 2; v++) sums[r][v] = load_vector<vf>(out + r * BLOCK_COLUMNS + v * WIDTH);
  for (int g = 0; g < run.groups; g++) {
    const vf scale[2] = {load_vector<vf>(scales), load_vector<vf>(scales + WIDTH)};
    QT_UNROLL
    for (int r = 0; r < COUNT; r++)
      QT_UNROLL
      for (int v = 0; v < 2; v++) {
        const vi sum = load_vector<vi>(run.products[g][v] + (first + r) * WIDTH);
        sums[r][v] = add_scaled(sum, scale[v], x_scales[r], sums[r][v]);
      }
    scales += BLOCK_COLUMNS, x_scales += run.rows;
  }
  QT_UNROLL
  for (int r = 0; r < COUNT; r++)
    QT_UNROLL
    for (int v = 0; v < 2; v++) store_vector(out + r * BLOCK_COLUMNS + v * WIDTH, sums[r][v]);
}

constexpr int ROWS_A_PASS = 8;  // 16 sums in registers

template <size_t... ROW>
void add_pass(int count, const Run& run, int first, float* out, std::index_sequence<ROW...>) {
  static constexpr decltype(&add_rows<1>) PASSES[] = {add_rows<int(ROW) + 1>...};
  PASSES[count - 1](run, first, out);
}

// Into the L2 cache. A few lines before each product, because all at once would wait for each other.
QT_INLINE void fetch(const uint8_t* p, int bytes) {
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

// Zeros of 16 columns in each of the 4 bytes of a column.
QT_INLINE vi spread_zeros(const int32_t* zeros) { return (vi)(load_vector<vu>(zeros) * 0x01010101u); }

QT_INLINE void store_codes(uint8_t* to, vi codes, vi zeros) {
  const __m512i v = _mm512_sub_epi8((__m512i)codes, (__m512i)zeros);
  std::memcpy(to, &v, sizeof v);
}

template <int BITS>
void unpack_bits(const TileWeights& w, uint8_t* out) {
  const uint8_t* steps = w.steps;
  for (int g = 0; g < w.groups; g++) {
    vi zeros[2];
    for (int v = 0; v < 2; v++) zeros[v] = spread_zeros(w.zeros + g * BLOCK_COLUMNS + v * WIDTH);
    for (int k = 0; k < w.group; k += 8, steps += steps_of_8(BITS), out += 2 * STEP_BYTES)
      for (int v = 0; v < 2; v++) {
        vi low, high;
        load_codes<BITS>(steps, v, low, high);
        store_codes(out + v * VECTOR_BYTES, low, zeros[v]);
        store_codes(out + STEP_BYTES + v * VECTOR_BYTES, high, zeros[v]);
      }
  }
}

}  // namespace

bool matrix_unit_allowed() {
  static const bool allowed = ask_for_tiles();
  return allowed;
}

bool matrix_unit_for(const Linear& w, int rows) {
  return w.compute == INT8 && w.group >= SMALLEST_GROUP && rows >= FEWEST_ROWS &&
         matrix_unit_allowed();
}

MatrixUnit::MatrixUnit(const Acts& a) : used_(a.by_rows) {
  if (!used_) return;
  const int width = a.group / pieces_of(a.group);
  TileConfig config = {};
  config.palette = 1;
  for (int tile : {LEFT, RIGHT, ROWS}) config.rows[tile] = uint8_t(most_rows(a));
  for (int tile : {LEFT_CODES, RIGHT_CODES}) config.rows[tile] = uint8_t(width / 4);
  for (int tile : {LEFT, RIGHT, LEFT_CODES, RIGHT_CODES}) config.bytes_a_row[tile] = TILE_BYTES;
  config.bytes_a_row[ROWS] = uint16_t(width);
  configure_tiles(config);
}

MatrixUnit::~MatrixUnit() {
  if (used_) release_tiles();
}

void unpack(const TileWeights& w, int bits, uint8_t* out) {
  bits == 4 ? unpack_bits<4>(w, out) : unpack_bits<8>(w, out);
}

void matrix_tile(int rows, const TileWeights& w, const TileActs& x, float* out) {
  alignas(64) GroupProducts products[GROUPS_A_RUN];
  for (int first = 0; first < w.groups; first += GROUPS_A_RUN) {
    const int groups = w.groups - first < GROUPS_A_RUN ? w.groups - first : GROUPS_A_RUN;
    for (int g = 0; g < groups; g++) {
      const int64_t k = int64_t(first + g) * w.group;
      if (w.ahead) fetch(w.ahead + (first + g) * w.group_bytes, w.group_bytes);
      multiply_group(x.values + k * rows, w.steps + k / 4 * STEP_BYTES, w.group, products[g]);
    }
    const Run run = {products, w.scales + first * BLOCK_COLUMNS, x.scales + first * rows, groups,
                     rows};
    for (int row = 0; row < rows; row += ROWS_A_PASS)
      add_pass(rows - row < ROWS_A_PASS ? rows - row : ROWS_A_PASS, run, row, out,
               std::make_index_sequence<ROWS_A_PASS>());
  }
}

#else

bool matrix_unit_allowed() { return false; }

bool matrix_unit_for(const Linear&, int) { return false; }

MatrixUnit::MatrixUnit(const Acts&) : used_(false) {}

MatrixUnit::~MatrixUnit() = default;

void matrix_tile(int, const TileWeights&, const TileActs&, float*) {}

#endif

}  // namespace qt
