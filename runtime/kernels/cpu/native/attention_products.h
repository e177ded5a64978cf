// Rows times stored words: the products of attention, in one form for keys and values.
//
//   out[r][c] = sum over i of rows[r][i] * word parts [i][c]
//
// The scores of a split have the dimensions of a head as i and its tokens as c; the weighted values
// have its tokens as i and the dimensions as c. Integer sums are exact. Float sums run over i in
// order, with one fused multiply-add each, so that a row's bits do not depend on the rows beside it.
#pragma once

#include "attention_plan.h"

namespace qt {

#if defined(QT_AVX512)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif
constexpr int MAX_STEPS = MAX_HEAD_DIM;
constexpr int MAX_COLUMN_VECTORS = MAX_HEAD_DIM / WIDTH;
static_assert(SPLIT <= MAX_STEPS && SPLIT <= MAX_COLUMN_VECTORS * WIDTH, "a split's values, keys");

// Tokens [begin, end) of the split that starts at `start`, a multiple of TILE each but for the end.
struct Part {
  const uint8_t* const* tiles;  // of the split
  int64_t start;
  int begin, end;

  int last() const { return (end + TILE - 1) / TILE * TILE; }
};

// Stored words: vector v of step s lies at steps[s] + columns[v].
struct WordTable {
  const uint8_t* steps[MAX_STEPS];
  ptrdiff_t columns[MAX_COLUMN_VECTORS];
  int vectors;
  int items;  // items of a row; the last step may have fewer than a word has parts
};

// Column vectors of a block: its sums, its operands and two more fill the registers.
constexpr int widest(int rows) {
  int vectors = 8;
  while ((rows + 1) * vectors + 2 > REGISTERS) vectors /= 2;
  return vectors;
}

// sums += part p of one step's words times the rows' items for it.
template <Word WORD, int R, int V>
static QT_INLINE void add_parts(typename Operands<WORD>::Sum (&sums)[R][V], const uint8_t* step,
                                const ptrdiff_t* columns, const float* rows, int p) {
  using S = Operands<WORD>;
  typename S::Operand parts[V];
  asm volatile("" : "+r"(step));  // or gcc keeps words for their next part, on the stack
  // Pinned, or gcc makes the next parts and items as well, adds them up first, and spills the sums.
  QT_UNROLL
  for (int v = 0; v < V; v++) {
    parts[v] = S::part(step + columns[v], p);
    pin(parts[v]);
  }
  QT_UNROLL
  for (int r = 0; r < R; r++) {
    int32_t bits;
    __builtin_memcpy(&bits, rows + r * ROW_STRIDE + p, sizeof bits);
    auto item = (typename S::Operand)spread(bits);
    pin(item);
    QT_UNROLL
    for (int v = 0; v < V; v++) {
      S::add(sums[r][v], parts[v], item);
      pin(sums[r][v]);
    }
  }
}

template <Word WORD, int R, int V>
QT_NOINLINE static void multiply_block(const WordTable& words, int first, const float* rows,
                                       void* out) {
  using S = Operands<WORD>;
  typename S::Sum sums[R][V];
  QT_UNROLL
  for (int r = 0; r < R; r++)
    QT_UNROLL
    for (int v = 0; v < V; v++) sums[r][v] = typename S::Sum{};
  const ptrdiff_t* columns = words.columns + first;
  const uint8_t* const* step = words.steps;
#pragma GCC unroll 1
  for (const auto end = step + words.items / S::PARTS; step != end; step++, rows += S::PARTS)
    QT_UNROLL
    for (int p = 0; p < S::PARTS; p++) add_parts<WORD>(sums, *step, columns, rows, p);
  if (words.items % S::PARTS) add_parts<WORD>(sums, *step, columns, rows, 0);
  QT_UNROLL
  for (int r = 0; r < R; r++)
    QT_UNROLL
    for (int v = 0; v < V; v++)
      __builtin_memcpy(static_cast<float*>(out) + r * ROW_STRIDE + (first + v) * WIDTH, &sums[r][v],
                       VECTOR_BYTES);
}

template <Word WORD, int R, int V = widest(R)>
static void multiply_columns(const WordTable& words, int first, const float* rows, void* out) {
  for (; first + V <= words.vectors; first += V)
    multiply_block<WORD, R, V>(words, first, rows, out);
  if constexpr (V > 1) multiply_columns<WORD, R, V / 2>(words, first, rows, out);
}

// rows and out are ROW_STRIDE floats apart; out has floats or integers as the stored form has.
template <Word WORD>
static void multiply(const WordTable& words, int count, const float* rows, void* out) {
  float* to = static_cast<float*>(out);
  while (count > 0) {
    int done = 0;
    // Twelve rows with one vector of columns would be slower than two times six.
    if constexpr (widest(12) > 1)
      if (count >= 12) multiply_columns<WORD, 12>(words, 0, rows, to), done = 12;
    if (done) {}
    else if (count >= 6) multiply_columns<WORD, 6>(words, 0, rows, to), done = 6;
    else if (count >= 4) multiply_columns<WORD, 4>(words, 0, rows, to), done = 4;
    else if (count == 3) multiply_columns<WORD, 3>(words, 0, rows, to), done = 3;
    else if (count == 2) multiply_columns<WORD, 2>(words, 0, rows, to), done = 2;
    else multiply_columns<WORD, 1>(words, 0, rows, to), done = 1;
    count -= done, rows += done * ROW_STRIDE, to += done * ROW_STRIDE;
  }
}

// Columns are tokens from `begin` on, items the dimensions. Words lie `at` bytes behind a tile.
template <Word WORD>
static WordTable find_keys(const Part& part, int head_dim, int at) {
  using S = Operands<WORD>;
  WordTable words;
  words.items = head_dim / S::PER_ITEM;
  words.vectors = (part.last() - part.begin) / WIDTH;
  const uint8_t* const* tiles = part.tiles + part.begin / TILE;
  for (int s = 0; s < words.items / S::PARTS; s++)
    words.steps[s] = tiles[0] + at + s * TILE * sizeof(float);
  for (int v = 0; v < words.vectors; v++)
    words.columns[v] = tiles[v / TILE_VECTORS] - tiles[0] + v % TILE_VECTORS * VECTOR_BYTES;
  return words;
}

// Columns are `width` dimensions from `first` on, items the tokens from `begin` to `end`. Where a
// word may hold no number there are none beyond: what is not the sequence's own may be NaN, and
// weights of 0 do not hide a NaN.
template <Word WORD>
static WordTable find_values(const Part& part, int head_dim, int at, int first, int width) {
  using S = Operands<WORD>;
  constexpr int NEIGHBOURS = neighbours(WORD);
  WordTable words;
  const int tokens = part.end - part.begin;
  words.items = S::FINITE ? (tokens + NEIGHBOURS - 1) / NEIGHBOURS * S::PARTS : tokens;
  words.vectors = width / WIDTH;
  for (int t = part.begin, s = 0; t < part.end; t += NEIGHBOURS, s++)
    words.steps[s] = part.tiles[t / TILE] + at +
                     (t % TILE / NEIGHBOURS * head_dim + first) * sizeof(float);
  for (int v = 0; v < words.vectors; v++) words.columns[v] = v * VECTOR_BYTES;
  return words;
}

}  // namespace qt
