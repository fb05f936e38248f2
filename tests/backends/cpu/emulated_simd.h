// The AVX-512 intrinsics and the tile instructions that the engines use, in plain C++, from Intel's definitions.
//
// A unit that is compiled with MLA_EMULATED includes this beside what the processor has, and is compiled without
// AVX-512: the names of intrinsics mean the functions here, and one that is used and not defined here does not compile.
// So the engine's own text is what runs.  Source of each: the pseudocode of Intel's Software Developer's Manual and
// Intrinsics Guide.  test_emulated_simd.py holds them against definitions written once more in exact arithmetic.
#pragma once
#include <immintrin.h>  // for the types alone

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulated {

#define MLA_INLINE static __attribute__((noinline, unused))  // or a unit takes a minute to compile

// ---- what has been executed ----

struct Counts {  // as simd.py has them
  int64_t dots, tile_dots, tile_loads, tile_stores, exponentials, conversions, broadcasts, loads, stores;
};
inline Counts counts{};  // of all threads that were alone

// How often each 64 bytes of this memory were loaded, whole or in part.
struct Watched {
  uintptr_t from = 0, to = 0;
  int32_t* times = nullptr;
};
inline Watched watched;
inline void seen(const void* p) {
  const uintptr_t at = uintptr_t(p);
  if (at < watched.from || at >= watched.to) return;
  const uintptr_t first = (at - watched.from) / 64, last = (at + 63 - watched.from) / 64;
  watched.times[first]++;
  if (last > first) watched.times[last]++;
}

// ---- bits ----

template <class To, class From>
MLA_INLINE To bits(const From& x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}
struct F32 {
  float x[16];
};
struct I16 {
  uint16_t x[32];
};
struct I32 {
  uint32_t x[16];
};
struct I64 {
  uint64_t x[8];
};

// A denormal is the zero of its sign: what the bf16 instructions do to what they read and to what they write.
MLA_INLINE float flushed(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.f, x) : x; }
MLA_INLINE float widened(uint16_t x) { return flushed(bits<float>(uint32_t(x) << 16)); }
MLA_INLINE float fused(float a, float b, float c) { return flushed(std::fma(a, b, flushed(c))); }

// convert_fp32_to_bfloat16: to nearest even; a NaN is made quiet and keeps its upper bits.
MLA_INLINE uint16_t narrowed(float value) {
  uint32_t x = bits<uint32_t>(flushed(value));
  if (value != value) return uint16_t(x >> 16 | 0x40);
  return uint16_t((x + 0x7fff + (x >> 16 & 1)) >> 16);  // infinity stays: its lower bits are 0
}

// ---- memory and constants ----

MLA_INLINE __m512i loadu_si512(const void* p) {
  counts.loads++, seen(p);
  __m512i x;
  std::memcpy(&x, p, 64);
  return x;
}
MLA_INLINE void storeu_si512(void* p, __m512i x) { counts.stores++, std::memcpy(p, &x, 64); }

[[noreturn]] inline void fault(const char* what) {  // where the processor raises an exception
  std::fprintf(stderr, "emulated processor: %s\n", what);
  std::abort();
}
MLA_INLINE void aligned(const void* p) {
  if (uintptr_t(p) % 64) fault("an aligned load or store of an address that is no multiple of 64");
}
MLA_INLINE __m512i load_si512(const void* p) { return aligned(p), loadu_si512(p); }
MLA_INLINE void store_si512(void* p, __m512i x) { aligned(p), storeu_si512(p, x); }

MLA_INLINE __m512i setzero_si512() { return __m512i{}; }
MLA_INLINE __m512i set1_epi32(int x) {
  counts.broadcasts++;
  I32 r;
  for (auto& each : r.x) each = uint32_t(x);
  return bits<__m512i>(r);
}

// ---- order ----

template <class T, bool high>
MLA_INLINE __m512i unpacked(__m512i a, __m512i b) {  // in each 128 bits, the lower or upper half of a and b in turns
  T x = bits<T>(a), y = bits<T>(b), r;
  constexpr int n = 16 / sizeof(x.x[0]), lanes = 4;
  for (int l = 0; l < lanes; l++)
    for (int i = 0; i < n / 2; i++) {
      int from = l * n + high * n / 2 + i;
      r.x[l * n + 2 * i] = x.x[from];
      r.x[l * n + 2 * i + 1] = y.x[from];
    }
  return bits<__m512i>(r);
}
MLA_INLINE __m512i unpacklo_epi16(__m512i a, __m512i b) { return unpacked<I16, false>(a, b); }
MLA_INLINE __m512i unpackhi_epi16(__m512i a, __m512i b) { return unpacked<I16, true>(a, b); }
MLA_INLINE __m512i unpacklo_epi32(__m512i a, __m512i b) { return unpacked<I32, false>(a, b); }
MLA_INLINE __m512i unpackhi_epi32(__m512i a, __m512i b) { return unpacked<I32, true>(a, b); }
MLA_INLINE __m512i unpacklo_epi64(__m512i a, __m512i b) { return unpacked<I64, false>(a, b); }
MLA_INLINE __m512i unpackhi_epi64(__m512i a, __m512i b) { return unpacked<I64, true>(a, b); }
template <int immediate>
MLA_INLINE __m512i shuffle_i32x4(__m512i a, __m512i b) {  // 128 bits each: two chosen of a, then two of b
  I64 x = bits<I64>(a), y = bits<I64>(b), r;
  for (int i = 0; i < 8; i++) {
    int from = 2 * (immediate >> i / 2 * 2 & 3) + i % 2;
    r.x[i] = i < 4 ? x.x[from] : y.x[from];
  }
  return bits<__m512i>(r);
}
MLA_INLINE __m512 permutex2var_ps(__m512 a, __m512i index, __m512 b) {  // bit 4 of an index: b
  I32 at = bits<I32>(index);
  F32 x = bits<F32>(a), y = bits<F32>(b), r;
  for (int i = 0; i < 16; i++) r.x[i] = (at.x[i] & 16 ? y : x).x[at.x[i] & 15];
  return bits<__m512>(r);
}

// ---- bf16 ----

MLA_INLINE __m512bh cvtne2ps_pbh(__m512 a, __m512 b) {  // b below, a above
  counts.conversions++;
  F32 x = bits<F32>(a), y = bits<F32>(b);
  I16 r;
  for (int i = 0; i < 16; i++) r.x[i] = narrowed(y.x[i]), r.x[16 + i] = narrowed(x.x[i]);
  return bits<__m512bh>(r);
}
// Two steps an element, the upper product first, each rounded to nearest even, denormals flushed.
MLA_INLINE __m512 dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  counts.dots++;
  F32 s = bits<F32>(sum);
  I16 x = bits<I16>(a), y = bits<I16>(b);
  for (int i = 0; i < 16; i++) {
    float upper = fused(widened(x.x[2 * i + 1]), widened(y.x[2 * i + 1]), s.x[i]);
    s.x[i] = fused(widened(x.x[2 * i]), widened(y.x[2 * i]), upper);
  }
  return bits<__m512>(s);
}

// ---- float32 ----

template <class F>
MLA_INLINE __m512 each(__m512 a, __m512 b, F f) {
  F32 x = bits<F32>(a), y = bits<F32>(b);
  for (int i = 0; i < 16; i++) x.x[i] = f(x.x[i], y.x[i]);
  return bits<__m512>(x);
}
MLA_INLINE __m512 max_ps(__m512 a, __m512 b) {  // b where either is no number, and of two zeros
  return each(a, b, [](float x, float y) { return x > y ? x : y; });
}
// What is left of a number beside its floor, all bits before the point (immediate 1; 8: nothing is reported).
template <int immediate>
MLA_INLINE __m512 reduce_ps(__m512 a) {
  static_assert((immediate & ~8) == 1);
  return each(a, a, [](float x, float) { return std::isinf(x) ? 0.f : x - std::floor(x); });
}
MLA_INLINE __m512 scalef_ps(__m512 a, __m512 b) {  // a 2^floor(b), for a that is neither 0 nor infinite
  counts.exponentials++;
  return each(a, b, [](float x, float y) {
    if (x != x || y != y) return x + y;
    const float power = std::floor(y);
    return power < -1000 ? std::copysign(0.f, x) : std::ldexp(x, power > 1000 ? 1000 : int(power));
  });
}

// ---- fp16, which the processor converts 8 at a time ----

MLA_INLINE __m512 cvtph_ps(__m256i a) {
  F32 r;
  __m128i half[2];
  std::memcpy(half, &a, sizeof a);
  for (int i = 0; i < 2; i++) _mm256_storeu_ps(r.x + 8 * i, _mm256_cvtph_ps(half[i]));
  return bits<__m512>(r);
}
template <int immediate>
MLA_INLINE __m256i cvtps_ph(__m512 a) {
  F32 x = bits<F32>(a);
  __m128i half[2];
  for (int i = 0; i < 2; i++) half[i] = _mm256_cvtps_ph(_mm256_loadu_ps(x.x + 8 * i), immediate);
  __m256i r;
  std::memcpy(&r, half, sizeof r);
  return r;
}

// ---- tiles ----

struct Configuration {  // the 64 bytes that ldtilecfg reads
  uint8_t palette, start, reserved[14];
  uint16_t bytes[16];  // of a row of each tile
  uint8_t rows[16];
};
static_assert(sizeof(Configuration) == 64);
struct Tiles {  // of a thread
  Configuration shape;
  uint8_t data[8][16][64];
};
inline thread_local Tiles tiles{};

inline void need(bool holds, const char* what) {
  if (!holds) fault(what);
}
inline void shaped(int t) {
  need(tiles.shape.palette == 1, "a tile instruction in a thread that has configured no tiles");
  need(tiles.shape.rows[t] && tiles.shape.bytes[t], "a tile that the configuration leaves out");
}
inline void ldtilecfg(const void* memory) {
  Configuration c;
  std::memcpy(&c, memory, sizeof c);
  tiles = {};
  if (c.palette == 0) return;
  need(c.palette == 1 && c.start == 0, "ldtilecfg: a palette other than 1, or a start");
  for (int i = 0; i < 14; i++) need(c.reserved[i] == 0, "ldtilecfg: a reserved byte is set");
  for (int t = 0; t < 16; t++) {
    need(t < 8 || (!c.rows[t] && !c.bytes[t]), "ldtilecfg: there are eight tiles");
    need(c.rows[t] <= 16 && c.bytes[t] <= 64, "ldtilecfg: a tile has at most 16 rows of 64 bytes");
    need(!c.rows[t] == !c.bytes[t], "ldtilecfg: a tile with rows and no bytes, or bytes and no rows");
  }
  tiles.shape = c;
}
inline void tilerelease() { tiles = {}; }
inline void tilezero(int t) {
  shaped(t);
  std::memset(tiles.data[t], 0, sizeof tiles.data[t]);
}
inline void tileload(int t, const void* from, long stride) {  // what the shape does not cover becomes 0
  tilezero(t);
  counts.tile_loads++;
  for (int r = 0; r < tiles.shape.rows[t]; r++) seen(static_cast<const char*>(from) + r * stride);
  for (int r = 0; r < tiles.shape.rows[t]; r++)
    std::memcpy(tiles.data[t][r], static_cast<const char*>(from) + r * stride, tiles.shape.bytes[t]);
}
inline void tilestore(int t, void* to, long stride) {
  shaped(t);
  counts.tile_stores++;
  for (int r = 0; r < tiles.shape.rows[t]; r++)
    std::memcpy(static_cast<char*>(to) + r * stride, tiles.data[t][r], tiles.shape.bytes[t]);
}
// c += a b: a of rows of pairs along k, b of pairs of k. Even and odd products are summed apart, then added together,
// then to c, each step rounded to nearest even, denormals flushed.
inline void tiledot(int c, int a, int b) {
  counts.tile_dots++;
  shaped(a), shaped(b), shaped(c);
  const Configuration& s = tiles.shape;
  need(a != b && b != c && a != c, "tdpbf16ps: the three tiles must differ");
  bool fit = s.rows[c] == s.rows[a] && s.bytes[c] == s.bytes[b] && s.bytes[a] == 4 * s.rows[b];
  need(fit, "tdpbf16ps: shapes do not fit");
  need(s.bytes[c] % 4 == 0 && s.bytes[a] % 4 == 0, "tdpbf16ps: rows of whole pairs");
  for (int m = 0; m < s.rows[c]; m++)
    for (int n = 0; n < s.bytes[c] / 4; n++) {
      float part[2] = {0, 0}, sum;
      for (int k = 0; k < s.bytes[a] / 4; k++)
        for (int i = 0; i < 2; i++) {
          uint16_t x, y;
          std::memcpy(&x, &tiles.data[a][m][4 * k + 2 * i], 2);
          std::memcpy(&y, &tiles.data[b][k][4 * n + 2 * i], 2);
          part[i] = fused(widened(x), widened(y), part[i]);
        }
      std::memcpy(&sum, &tiles.data[c][m][4 * n], 4);
      sum = flushed(flushed(sum) + flushed(part[0] + part[1]));
      std::memcpy(&tiles.data[c][m][4 * n], &sum, 4);
    }
}

}  // namespace emulated

// The names that the engines use. Those with an immediate are macros of the compiler's own where it does not optimise.
#define _mm512_loadu_si512 ::emulated::loadu_si512
#define _mm512_storeu_si512 ::emulated::storeu_si512
#define _mm512_load_si512 ::emulated::load_si512
#define _mm512_store_si512 ::emulated::store_si512
#define _mm512_setzero_si512 ::emulated::setzero_si512
#define _mm512_set1_epi32 ::emulated::set1_epi32
#define _mm512_permutex2var_ps ::emulated::permutex2var_ps
#define _mm512_cvtne2ps_pbh ::emulated::cvtne2ps_pbh
#define _mm512_dpbf16_ps ::emulated::dpbf16_ps
#define _mm512_cvtph_ps ::emulated::cvtph_ps
#define _mm512_unpacklo_epi16 ::emulated::unpacklo_epi16
#define _mm512_unpackhi_epi16 ::emulated::unpackhi_epi16
#define _mm512_unpacklo_epi32 ::emulated::unpacklo_epi32
#define _mm512_unpackhi_epi32 ::emulated::unpackhi_epi32
#define _mm512_unpacklo_epi64 ::emulated::unpacklo_epi64
#define _mm512_unpackhi_epi64 ::emulated::unpackhi_epi64
#define _mm512_max_ps ::emulated::max_ps
#define _mm512_scalef_ps ::emulated::scalef_ps
#undef _mm512_reduce_ps
#undef _mm512_shuffle_i32x4
#undef _mm512_cvtps_ph
#define _mm512_shuffle_i32x4(a, b, i) ::emulated::shuffle_i32x4<i>(a, b)
#define _mm512_reduce_ps(a, i) ::emulated::reduce_ps<i>(a)
#define _mm512_cvtps_ph(a, i) ::emulated::cvtps_ph<i>(a)
