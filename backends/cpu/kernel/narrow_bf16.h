// Attention of at most 8 rows by products of bf16 pairs: lanes are features, keys are read where they lie.
//
// As narrow.h, but nothing is widened: for scores, pairs of features meet pairs of a query's; for P C two keys that
// follow each other are woven into pairs, whose columns come in the order of `write` of bf16.h.  Rows of 16 lanes would
// be at most half full, so this is at most as many products as half of bf16.h's for scores, and as many for P C.

#pragma once
#include "bf16.h"
#include "narrow.h"

namespace {

constexpr int FEW = 8;

// The sums over the lanes of 16 vectors, one in each lane.
INLINE Floats sums_of(const Floats* v) {
  Floats a[8], b[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    const __m512i x = (__m512i)v[2 * i], y = (__m512i)v[2 * i + 1];
    a[i] = (Floats)_mm512_unpacklo_epi32(x, y) + (Floats)_mm512_unpackhi_epi32(x, y);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512i x = (__m512i)a[2 * i], y = (__m512i)a[2 * i + 1];
    b[i] = (Floats)_mm512_unpacklo_epi64(x, y) + (Floats)_mm512_unpackhi_epi64(x, y);
  }
  const auto halved = [](Floats x, Floats y) __attribute__((always_inline)) {
    return (Floats)_mm512_shuffle_i32x4((__m512i)x, (__m512i)y, 0x88) +
           (Floats)_mm512_shuffle_i32x4((__m512i)x, (__m512i)y, 0xdd);
  };
  return halved(halved(b[0], b[1]), halved(b[2], b[3]));
}

struct NarrowPairs : Narrow<Bf16> {
  Rows<Bf16> rows = {};
  alignas(64) Bf16 p[FEW][NARROW_TILE];  // a row's weights, rounded

  static bool takes(Shape shape, long rows) { return rows <= FEW && shape.latent % 128 == 0; }
  static long floats(Shape) { return FEW * NARROW_TILE; }
  NarrowPairs(float* memory, Shape shape) : Narrow<Bf16>(shape, nullptr, memory) {}

  void pack(const Rows<Bf16>& given) { rows = given; }  // they are read where they lie

  static INLINE __m512bh pairs(const Bf16* from) { return (__m512bh)_mm512_loadu_si512(from); }

  // Scores of N keys with R rows from `row` on: sums that are still spread over lanes, [row][key].
  template <int R, int N> INLINE void spread(const Bf16* const* latent, const Bf16* const* rope, int row, Floats* to) {
    __m512 acc[R * N] = {};
    for (int part = 0; part < 2; part++) {
      const Bf16* const* from = part ? rope : latent;
      const int n = part ? shape.rope : shape.latent;
      const Bf16* own = (part ? rows.rope : rows.latent) + long(row) * n;
      for (int f = 0; f < n; f += 32) {
        __m512bh c[N];
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) c[i] = pairs(from[i] + f), __builtin_prefetch(from[i + FARTHEST] + f);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          const __m512bh x = pairs(own + long(r) * n + f);
#pragma GCC unroll 8
          for (int i = 0; i < N; i++) acc[r * N + i] = _mm512_dpbf16_ps(acc[r * N + i], x, c[i]);
        }
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < R * N; i++) to[i] = (Floats)acc[i];
  }

  template <int R> APART void scores(const Bf16* const* latent, const Bf16* const* rope, int n, int row) {
    constexpr int N = R == 8 ? 2 : 4, KEYS = LANES / R;  // at a time, and until their sums are taken
    for (int k = 0; k < n; k += KEYS) {
      Floats v[LANES];
      for (int i = 0; i < KEYS; i += N) spread<R, N>(latent + k + i, rope + k + i, row, v + i * R);
      float sums[LANES];
      store(sums, sums_of(v));
      for (int i = 0; i < LANES; i++) s[(row + i % (R * N) / N) * NARROW_TILE + k + i / (R * N) * N + i % N] = sums[i];
    }
  }

  // o (+)= p c of R rows from `row` on, whose weights are 0 from n on, and J times 32 columns from d on.
  template <int R, int J> INLINE void value(const Bf16* const* latent, int n, int row, int d, bool first, Sums sums) {
    __m512 acc[R][2 * J];
    float* o = sums.o + long(row) * shape.wide() + d;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int j = 0; j < 2 * J; j++) acc[r][j] = first ? __m512{} : (__m512)load(o + r * shape.wide() + j * LANES);
    for (int k = 0; k < n; k += 2) {
      __m512bh c[2 * J];
#pragma GCC unroll 4
      for (int j = 0; j < J; j++) {
        const __m512i even = _mm512_loadu_si512(latent[k] + d + 32 * j), odd = _mm512_loadu_si512(latent[k + 1] + d + 32 * j);
        c[2 * j] = (__m512bh)_mm512_unpacklo_epi16(even, odd);
        c[2 * j + 1] = (__m512bh)_mm512_unpackhi_epi16(even, odd);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const __m512bh x = (__m512bh)_mm512_set1_epi32(raw<Bf16, int>(p[row + r] + k));
#pragma GCC unroll 8
        for (int j = 0; j < 2 * J; j++) acc[r][j] = _mm512_dpbf16_ps(acc[r][j], x, c[j]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int j = 0; j < 2 * J; j++) store(o + r * shape.wide() + j * LANES, (Floats)acc[r][j]);
  }
  template <int R> APART void values(const Bf16* const* latent, int n, int row, bool first, Sums sums) {
    constexpr int J = R == 8 ? 1 : R == 4 ? 2 : 4;
    for (int d = 0; d < shape.latent; d += 32 * J) value<R, J>(latent, n, row, d, first, sums);
  }

  // As attend() of attend.h.
  void attend(const Keys<Bf16>& keys, long from, long to, const Rows<Bf16>& rows, long heads, float scale, Sums sums) {
    const Bf16 *latent[NARROW_TILE + FARTHEST], *rope[NARROW_TILE + FARTHEST];
    for (long at = from; at < to; at += NARROW_TILE) {
      const int n = tile_of(keys, at, to, latent, rope);
      by_rows<FEW>(rows.count, [&](int row, auto some) { scores<decltype(some)::count>(latent, rope, n, row); });
      for (int row = 0; row < rows.count; row++) {
        softmax(row, n, heads ? (rows.first + row) / heads + 1 - at : n, scale / LN2, at == from, sums);
        for (int k = 0; k < NARROW_TILE; k += 2 * LANES) {
          const __m512 lower = (__m512)load(s + row * NARROW_TILE + k), upper = (__m512)load(s + row * NARROW_TILE + k + LANES);
          _mm512_store_si512(p[row] + k, (__m512i)_mm512_cvtne2ps_pbh(upper, lower));
        }
      }
      by_rows<FEW>(rows.count, [&](int row, auto some) { values<decltype(some)::count>(latent, n, row, at == from, sums); });
    }
  }

  void write(const float* o, float factor, Bf16* out) const { write_columns(shape, o, factor, out); }
};

}  // namespace
