// Attention of fewer than 8 rows: lanes are features, keys are read where they lie, and softmax has keys in its lanes.
//
// So few rows do not fill the lanes of attend.h, and bringing a tile together would cost as much as they do.  Each key
// is read from memory once, for its score, and from the cache again, for its latent.  What a key costs is little more
// than its bytes, so a key is asked of memory some keys before it is used, sums across lanes are made four at a time, and
// pairs of bf16 are not put in order: queries and accumulators have their features in the order of load_two.

#pragma once
#include "attend.h"

namespace {

constexpr int NARROW = 7, NARROW_TILE = 64;
// How many keys ahead one is asked for here, and by whoever asks for the farthest.  With 8 lanes 16 took an eighth longer
// than 4 from the L3 cache (one row, float32), since they fall out of the L1 cache again, and as long from memory.
constexpr int AHEAD = LANES / 2, FARTHEST = 16;

template <class T> struct Narrow {
  Shape shape;
  float *q, *s;  // [row][feature], [row][key of the tile]

  static bool takes(Shape shape, long rows) {
    return rows <= NARROW && shape.latent % (8 * LANES) == 0 && shape.rope % (2 * LANES) == 0;
  }
  static long floats(Shape shape) { return NARROW * long(shape.features() + NARROW_TILE); }
  Narrow(Shape shape, float* q, float* s) : shape(shape), q(q), s(s) {}
  Narrow(float* memory, Shape shape) : Narrow(shape, memory, memory + NARROW * long(shape.features())) {}

  void pack(const Rows<T>& rows) {
    for (int row = 0; row < rows.count; row++) {
      float* to = q + long(row) * shape.features();
      widen(rows.latent + long(row) * shape.latent, shape.latent, to);
      widen(rows.rope + long(row) * shape.rope, shape.rope, to + shape.latent);
    }
  }
  static void widen(const T* from, int n, float* to) {
    for (int f = 0; f < n; f += 2 * LANES) {
      Floats a, b;
      load_two(from + f, a, b);
      store(to + f, a), store(to + f + LANES, b);
    }
  }

  // Scores of N keys with R rows from `row` on, to the tile's columns from k on.
  template <int R, int N> INLINE void score(const T* const* latent, const T* const* rope, int row, int k) {
    constexpr int PARTS = R * N < 8 ? 2 : 1;  // as many sums as a processor adds to at a time
    Floats acc[PARTS][R * N] = {};
    const float* own = q + long(row) * shape.features();
    for (int part = 0; part < 2; part++) {
      const T* const* from = part ? rope : latent;
      for (int f = 0, n = part ? shape.rope : shape.latent; f < n; f += 2 * LANES) {
        Floats a[N], b[N];
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) {
          load_two(from[i] + f, a[i], b[i]);
          for (int line = 0; line < 2 * LANES; line += 64 / sizeof(T)) __builtin_prefetch(from[i + AHEAD] + f + line);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          const float* x = own + long(r) * shape.features() + f;
          Floats even = load(x), odd = load(x + LANES);
#pragma GCC unroll 4
          for (int i = 0; i < N; i++) acc[0][r * N + i] += even * a[i], acc[PARTS - 1][r * N + i] += odd * b[i];
        }
      }
      own += shape.latent;
    }
#pragma GCC unroll 2
    for (int i = 0; i < R * N; i += 4) {
      Floats some[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) some[j] = PARTS == 2 ? acc[0][i + j] + acc[1][i + j] : acc[0][i + j];
      __m128 four = sums(some[0], some[1], some[2], some[3]);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) s[(row + (i + j) / N) * NARROW_TILE + k + (i + j) % N] = four[j];
    }
  }

  template <int R> void scores(const T* const* latent, const T* const* rope, int n, int row) {
    constexpr int N = R == 1 ? 4 : 2;
    for (int k = 0; k < n; k += N) score<R, N>(latent + k, rope + k, row, k);
  }

  // Scores of a row to weights; what is behind n, and what the row does not see, gets none.
  void softmax(int row, int n, int seen, float scale2, bool first, Sums sums) {
    float* p = s + row * NARROW_TILE;
    for (int k = seen < 0 ? 0 : least(seen, n); k < NARROW_TILE; k++) p[k] = -INF;
    Floats high = all(-INF);
    for (int k = 0; k < n; k += LANES) high = larger(load(p + k), high);
    float top = largest(high) * scale2, before = 0;
    if (!first) {
      float old = sums.peak[row];
      top = top > old ? top : old;
      float shrink = exp2(old - top);
      before = sums.total[row] * shrink;
      float* o = sums.o + long(row) * shape.wide();
      if (shrink != 1)
        for (int d = 0; d < shape.latent; d += LANES) store(o + d, load(o + d) * shrink);
    }
    sums.peak[row] = top;
    Floats total = {};
    for (int k = 0; k < n; k += LANES) {
      Floats x = exp2(load(p + k) * scale2 - top);
      store(p + k, x);
      total += x;
    }
    sums.total[row] = before + sum(total);
  }

  template <int R, int N> INLINE void value(const T* const* latent, int n, int row, int d, bool first, Sums sums) {
    Floats acc[R][N];
    for (int r = 0; r < R; r++)
      for (int j = 0; j < N; j++) acc[r][j] = first ? Floats{} : load(sums.o + long(row + r) * shape.wide() + d + j * LANES);
    for (int k = 0; k < n; k++) {
      float p[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) p[r] = s[(row + r) * NARROW_TILE + k];
#pragma GCC unroll 4
      for (int j = 0; j < N; j += 2) {
        Floats a, b;
        load_two(latent[k] + d + j * LANES, a, b);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) acc[r][j] += p[r] * a, acc[r][j + 1] += p[r] * b;
      }
    }
    for (int r = 0; r < R; r++)
      for (int j = 0; j < N; j++) store(sums.o + long(row + r) * shape.wide() + d + j * LANES, acc[r][j]);
  }

  template <int R> void values(const T* const* latent, int n, int row, bool first, Sums sums) {
    constexpr int N = R == 1 ? 8 : R == 2 ? 4 : 2;
    for (int d = 0; d < shape.latent; d += N * LANES) value<R, N>(latent, n, row, d, first, sums);
  }

  // Where the keys of a tile from `at` on lie, and FARTHEST behind it, and how many the tile has; the last key goes for
  // those that there are not, since scores are made by several and keys are asked for ahead.
  static int tile_of(const Keys<T>& keys, long at, long to, const T** latent, const T** rope) {
    const int known = least(NARROW_TILE + FARTHEST, to - at);
    keys.find(at, known, latent, rope);
    for (int k = known; k < NARROW_TILE + FARTHEST; k++) latent[k] = latent[known - 1], rope[k] = rope[known - 1];
    return least(NARROW_TILE, known);
  }

  // As attend() of attend.h.
  void attend(const Keys<T>& keys, long from, long to, const Rows<T>& rows, long heads, float scale, Sums sums) {
    const T *latent[NARROW_TILE + FARTHEST], *rope[NARROW_TILE + FARTHEST];
    for (long at = from; at < to; at += NARROW_TILE) {
      const int n = tile_of(keys, at, to, latent, rope);
      by_rows<4>(rows.count, [&](int row, auto some) { scores<decltype(some)::count>(latent, rope, n, row); });
      for (int row = 0; row < rows.count; row++)
        softmax(row, n, heads ? (rows.first + row) / heads + 1 - at : n, scale / LN2, at == from, sums);
      by_rows<4>(rows.count, [&](int row, auto some) { values<decltype(some)::count>(latent, n, row, at == from, sums); });
    }
  }

  void write(const float* o, float factor, T* out) const {
    for (int d = 0; d < shape.latent; d += 2 * LANES) store_two(out + d, load(o + d) * factor, load(o + d + LANES) * factor);
  }

  template <int R> struct Count {
    static constexpr int count = R;
  };
  template <int M, class F> static INLINE void by_rows(int rows, F f, int row = 0) {  // M at a time, then half of that
    for (; row + M <= rows; row += M) f(row, Count<M>{});
    if constexpr (M > 1) by_rows<M / 2>(rows, f, row);
  }
};

}  // namespace
