// Engine of products in float32: every number is widened once, when a tile of keys is brought together in the L2 cache.
//
// The tile has a key in a row, latent then rope, and serves both products: for scores its numbers are spread over the
// lanes, against panels of packed queries; for P C its rows are the vectors, and P is spread.

#pragma once
#include "narrow.h"

namespace {

#ifdef MLA_SIXTEEN
constexpr int KEYS_HIGH = 12, ROWS_HIGH = 8, SLAB = 144;  // a block of products in registers, of 32
#else
constexpr int KEYS_HIGH = 6, ROWS_HIGH = 4, SLAB = 288;  // of 16
#endif

// s[i][j] (+)= sum_f keys[i][f] q[f][j] for M keys and N vectors of rows.
template <int M, int N> INLINE void score_block(const float* keys, long ld, const float* q, int features, float* s, bool add) {
  Floats acc[M][N];
#pragma GCC unroll 16
  for (int i = 0; i < M; i++)
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) acc[i][j] = add ? load(s + (i * N + j) * LANES) : Floats{};
  for (int f = 0; f < features; f++, q += N * LANES) {
    Floats b[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) b[j] = load(q + j * LANES);
#pragma GCC unroll 16
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) acc[i][j] += keys[i * ld + f] * b[j];
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; i++)
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) store(s + (i * N + j) * LANES, acc[i][j]);
}

// o[i][j] (+)= sum_k p[k][i] c[k][j] for ROWS_HIGH rows and N vectors of columns.
template <int N> INLINE void value_block(const float* p, int width, const float* c, long ld, int keys, float* o, long wide, bool add) {
  Floats acc[ROWS_HIGH][N];
#pragma GCC unroll 16
  for (int i = 0; i < ROWS_HIGH; i++) {
    const float *own = o + i * wide, *next = own + ROWS_HIGH * wide;  // rows that no prefetcher of a processor foresees
    __builtin_prefetch(next), __builtin_prefetch(next + N * LANES - 1);
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) acc[i][j] = add ? load(own + j * LANES) : Floats{};
  }
  for (int k = 0; k < keys; k++, p += width, c += ld) {
    Floats b[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) b[j] = load(c + j * LANES);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS_HIGH; i++)
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) acc[i][j] += p[i] * b[j];
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS_HIGH; i++)
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) store(o + i * wide + j * LANES, acc[i][j]);
}

// What does not depend on what keys are stored as.
struct Products {
  static constexpr int panel = 2 * LANES, tile = 72, group = 4;

  Shape shape;
  float *q, *s = nullptr, *c;  // packed queries, [panel][feature][row]; the scores, which become P; the tile
  long ld;                     // of the tile: an odd number of cache lines, so that a column's are spread over the sets
  int count = 0;               // rows

  static long row_floats(Shape shape) { return up_to(shape.features() + LANES, 32) + 16; }
  static long floats(Shape shape) { return ROWS * long(shape.features()) + tile * row_floats(shape); }
  Products(float* memory, Shape shape) : shape(shape), q(memory), c(memory + ROWS * long(shape.features())), ld(row_floats(shape)) {}

  int width(int row) const { return least(panel, up_to(count - row, LANES)); }

  // Scores of n keys of the tile.
  void scores(int n) {
    for (int row = 0, w; row < count; row += w) {
      w = width(row);
      w == panel ? panel_of<2>(row, n) : panel_of<1>(row, n);
    }
  }
  template <int N> void panel_of(int row, int n) {
    constexpr int high = N == 2 ? KEYS_HIGH : 2 * KEYS_HIGH, w = N * LANES;
    int features = shape.features();
    for (int f = 0; f < features; f += SLAB) {
      const float* packed = q + long(row) * features + long(f) * w;
      int some = least(SLAB, features - f), k = 0;
      float* to = s + long(row) * tile;
      for (; k + high <= n; k += high) score_block<high, N>(c + k * ld + f, ld, packed, some, to + k * w, f > 0);
      for (; k + 4 <= n; k += 4) score_block<4, N>(c + k * ld + f, ld, packed, some, to + k * w, f > 0);
      for (; k < n; k++) score_block<1, N>(c + k * ld + f, ld, packed, some, to + k * w, f > 0);
    }
  }

  template <class F> INLINE void take(F weight, float* s, int width, int k, int) {
#pragma GCC unroll 4
    for (int i = 0; i < group; i++) store(s + (k + i) * width, weight(i));
  }

  void values(int n, bool first, float* o) {
    int columns = up_to(shape.latent, LANES) / LANES;
    for (int d = 0; d < columns;) {
      int some = columns - d == 4 ? 2 : least(3, columns - d);  // 2 and 2, not 3 and 1
      some == 3 ? columns_of<3>(d, n, first, o) : some == 2 ? columns_of<2>(d, n, first, o) : columns_of<1>(d, n, first, o);
      d += some;
    }
  }
  template <int N> void columns_of(int d, int n, bool first, float* o) {
    long wide = shape.wide();
    for (int row = 0, w; row < count; row += w) {
      w = width(row);
      for (int i = 0; i < w; i += ROWS_HIGH)
        value_block<N>(s + long(row) * tile + i, w, c + d * LANES, ld, n, o + (row + i) * wide + d * LANES, wide, !first);
    }
  }
};

template <class T> struct Fma : Products {
  using Number = T;
  using Few = Narrow<T>;
  using Products::Products;

  void pack(const Rows<T>& rows) {
    count = rows.count;
    int features = shape.features();
    for (int row = 0, w; row < count; row += w) {
      w = width(row);
      for (int i = 0; i < w; i++) {
        float* to = q + long(row) * features + i;
        if (row + i >= count)
          for (int f = 0; f < features; f++) to[long(f) * w] = 0;
        else {
          scatter(rows.latent + long(row + i) * shape.latent, shape.latent, to, w);
          scatter(rows.rope + long(row + i) * shape.rope, shape.rope, to + long(shape.latent) * w, w);
        }
      }
    }
  }
  static void scatter(const T* from, int n, float* to, int step) {
    for (int f = 0; f < n; f += LANES) {
      float some[LANES];
      int count = least(LANES, n - f);
      store(some, count == LANES ? load(from + f) : load_some(from + f, count));
      for (int i = 0; i < count; i++) to[long(f + i) * step] = some[i];
    }
  }

  void scores(const Keys<T>& keys, long at, int n, float* to) {
    const T *latent[tile], *rope[tile];
    keys.find(at, n, latent, rope);
    for (int k = 0; k < n; k++) {
      const int later = least(k + AHEAD, n - 1);
      spread(latent[k], latent[later], shape.latent, c + k * ld);
      spread(rope[k], rope[later], shape.rope, c + k * ld + shape.latent);
    }
    s = to;
    Products::scores(n);
  }
  static void spread(const T* from, const T* later, int n, float* to) {  // and asks for a later one
    for (int f = 0; f < n; f += 64 / sizeof(T)) __builtin_prefetch(later + f);
    int f = 0;
    for (; f + LANES <= n; f += LANES) store(to + f, load(from + f));
    if (f < n) store(to + f, load_some(from + f, n - f));  // there is room behind the last feature
  }

  void write(const float* o, float factor, T* out) const {
    int d = 0;
    for (; d + LANES <= shape.latent; d += LANES) store(out + d, load(o + d) * factor);
    if (d < shape.latent) store_some(out + d, load(o + d) * factor, shape.latent - d);
  }
};

}  // namespace
