// The engine for processors with AVX-512 and its dot product of bf16 pairs, without tiles.
#include "divide.h"
#include "narrow_bf16.h"

namespace {

// c[R][16 V] = a b, or plus that where `add`.  The rows of a go on in `rest`; b is [features / 2][width][2].
template <int R, int V> APART void dots(Left a, Left rest, const Bf16* b, int width, float* c, long ldc, bool add) {
  __m512 sum[R][V];
#pragma GCC unroll 16
  for (int i = 0; i < R; i++)
#pragma GCC unroll 2
    for (int j = 0; j < V; j++) sum[i][j] = add ? (__m512)load(c + i * ldc + j * 16) : __m512{};
  for (int part = 0; part < 2; part++, a = rest) {
    const Bf16* fourth[(R + 3) / 4];  // every fourth row; from one alone there would be more distances than registers
    for (int i = 0; i < R; i += 4) {
      fourth[i / 4] = a.from + i * a.row;
      asm("" : "+r"(fourth[i / 4]));  // and it stays so
    }
    for (int f = 0; f < a.features; f += 2, b += 2 * width) {
      __m512bh right[V];
#pragma GCC unroll 2
      for (int j = 0; j < V; j++) right[j] = (__m512bh)_mm512_load_si512(b + j * 32);
#pragma GCC unroll 16
      for (int i = 0; i < R; i++) {
        const __m512bh left = (__m512bh)_mm512_set1_epi32(raw<Bf16, int>(fourth[i / 4] + i % 4 * a.row));
#pragma GCC unroll 2
        for (int j = 0; j < V; j++) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], left, right[j]);
      }
#pragma GCC unroll 4
      for (int i = 0; i < R; i += 4) fourth[i / 4] += 2;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; i++)
#pragma GCC unroll 2
    for (int j = 0; j < V; j++) store(c + i * ldc + j * 16, (Floats)sum[i][j]);
}

struct Dots {
  using Few = NarrowPairs;
  static constexpr int tile = 192;  // of 128 rows: in a MiB

  static void scores(Left latent, Left rope, const Bf16* q, int width, float* s) {
    if (width == 32)
      for (int k = 0; k < STEP; k += 8) dots<8, 2>(below(latent, k), below(rope, k), q, 32, s + k * 32, 32, false);
    else
      for (int k = 0; k < STEP; k += 16) dots<16, 1>(below(latent, k), below(rope, k), q, 16, s + k * 16, 16, false);
  }
  static void values(int rows, int keys, const Bf16* p, const Bf16* v, float* o, long wide, bool add) {
    const Left a{p, P_ROW, keys}, none{p, 0, 0};
    int h = 0;
    for (; rows - h > 4; h += 8) dots<8, 2>(below(a, h), none, v, COLUMNS, o + h * wide, wide, add);
    if (rows - h > 2) dots<4, 2>(below(a, h), none, v, COLUMNS, o + h * wide, wide, add);
    else if (rows - h == 2) dots<2, 2>(below(a, h), none, v, COLUMNS, o + h * wide, wide, add);
    else if (rows - h == 1) dots<1, 2>(below(a, h), none, v, COLUMNS, o + h * wide, wide, add);
  }
};

}  // namespace

void attend_avx512_bf16(const Call& call) { run<PairsOfBf16<Dots>>(call); }
