// Vectors of float32, as many lanes as the unit is compiled for, and numbers of 16 bits, which are widened on their way.
//
// Units are compiled for different instructions, so nothing here may be shared by them: all is in an unnamed namespace,
// and no function of the standard library is used that a compiler may leave in a unit for all of them.

#pragma once
#include <immintrin.h>
#ifdef MLA_EMULATED  // by a test, which has that file
#include "emulated_simd.h"
#endif
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(MLA_EMULATED)
#define MLA_SIXTEEN  // lanes
#endif
#define INLINE inline __attribute__((always_inline))
#define APART __attribute__((noinline))  // for long loops: inside another function they would share its registers

namespace {

#ifdef MLA_SIXTEEN
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr float INF = __builtin_inff(), LN2 = 0.69314718056f;

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

INLINE int least(int a, int b) { return a < b ? a : b; }
INLINE long up_to(long n, long step) { return (n + step - 1) / step * step; }
INLINE Floats all(float x) { return x - Floats{}; }

template <class T, class V> INLINE V raw(const T* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

INLINE Floats load(const float* p) { return raw<float, Floats>(p); }
INLINE Floats load(const Bf16* p) { return (Floats)(__builtin_convertvector((raw<Bf16, Halves>(p)), Words) << 16); }
INLINE Floats load(const Fp16* p) {
#ifdef MLA_SIXTEEN
  return (Floats)_mm512_cvtph_ps(raw<Fp16, __m256i>(p));
#else
  return (Floats)_mm256_cvtph_ps(raw<Fp16, __m128i>(p));
#endif
}

INLINE void store(float* p, Floats v) { memcpy(p, &v, sizeof v); }
INLINE void store(Bf16* p, Floats v) {  // to nearest, ties to even; NaN stays NaN
  Words w = (Words)v, rounded = w + 0x7fff + (w >> 16 & 1), kept = v == v ? rounded : w | 0x400000;
  Halves h = __builtin_convertvector(kept >> 16, Halves);
  memcpy(p, &h, sizeof h);
}
INLINE void store(Fp16* p, Floats v) {
#ifdef MLA_SIXTEEN
  __m256i h = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  __m128i h = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#endif
  memcpy(p, &h, sizeof h);
}

// The first `count` numbers of a vector whose others are 0, and back: what is left at the end of features.
template <class T> INLINE Floats load_some(const T* p, int count) {
  T some[LANES] = {};
  memcpy(some, p, count * sizeof(T));
  return load(some);
}
template <class T> INLINE void store_some(T* p, Floats v, int count) {
  T some[LANES];
  store(some, v);
  memcpy(p, some, count * sizeof(T));
}

// 2 LANES numbers as two vectors, in the order that is quickest, and back: bf16 come as the even ones and the odd ones.
template <class T> INLINE void load_two(const T* p, Floats& a, Floats& b) { a = load(p), b = load(p + LANES); }
INLINE void load_two(const Bf16* p, Floats& a, Floats& b) {
  Words pairs = raw<Bf16, Words>(p);
  a = (Floats)(pairs << 16), b = (Floats)(pairs & 0xffff0000);
}
template <class T> INLINE void store_two(T* p, Floats a, Floats b) { store(p, a), store(p + LANES, b); }
INLINE void store_two(Bf16* p, Floats a, Floats b) {
  Bf16 even[LANES], odd[LANES];
  store(even, a), store(odd, b);
  for (int i = 0; i < LANES; i++) p[2 * i] = even[i], p[2 * i + 1] = odd[i];
}

INLINE Floats larger(Floats a, Floats b) {  // b where either is NaN
#ifdef MLA_SIXTEEN
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#endif
}
INLINE float largest(Floats v) {
  float m = v[0];
  for (int i = 1; i < LANES; i++) m = v[i] > m ? v[i] : m;
  return m;
}
INLINE __m256 folded(Floats v) {  // to 8 lanes
#ifdef MLA_SIXTEEN
  __m256 halves[2];
  memcpy(halves, &v, sizeof v);
  return halves[0] + halves[1];
#else
  return (__m256)v;
#endif
}
INLINE __m128 sums(Floats a, Floats b, Floats c, Floats d) {  // of each
  __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(folded(a), folded(b)), _mm256_hadd_ps(folded(c), folded(d)));
  return _mm256_castps256_ps128(pairs) + _mm256_extractf128_ps(pairs, 1);
}
INLINE float sum(Floats v) { return sums(v, v, v, v)[0]; }

// 2^x for x up to a little above 0: relative error 2e-7, exactly 1 at 0, below -126 at most 2^-126 and 0 for -infinity,
// NaN for NaN.  The polynomials have the least largest relative error of those that are 1 at 0.
#ifdef MLA_SIXTEEN
INLINE Floats exp2(Floats x) {
  Floats r = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x less its floor; 0 for -infinity
  Floats y = r * 0.00186713005f + 0.00901703071f;
  y = y * r + 0.0557999127f;
  y = y * r + 0.240164444f;
  y = y * r + 0.693151295f;
  y = y * r + 1.f;
  return (Floats)_mm512_scalef_ps((__m512)y, (__m512)x);  // y * 2^floor(x)
}
#else
INLINE Floats exp2(Floats x) {
  x = larger(all(-127.f), x);
  Floats shifted = x + 12582912.f, r = x - (shifted - 12582912.f);  // 1.5 * 2^23: the sum's low bits are round(x)
  Floats y = r * 0.001326472731f + 0.009671512991f;
  y = y * r + 0.05550733581f;
  y = y * r + 0.2402224243f;
  y = y * r + 0.6931470037f;
  y = y * r + 1.f;
  return (Floats)((Words)y + ((Words)shifted << 23));
}
#endif
INLINE float exp2(float x) { return exp2(all(x))[0]; }

}  // namespace
