// Products of rows with weights that lie feature beside feature, for processors that have no products of 16-bit numbers.
//
//     out[t, f] = sum_d x[t, d] * w[d, f]
//
// A weight is read in panels of 16 features, d after d, and widened in registers; a sum is one lane of a register and
// takes its products in the order of d, whatever is computed beside it.  So a result does not depend on how many rows
// there are, nor on the width of the registers.  A tile is up to 6 rows by up to 4 panels: enough sums at once to hide
// the latency of an addition, few enough to stay in registers.  With few rows the time is that of reading the weights.
//
// Floats are summed in float32.  8-bit products are exact: pairs of neighbouring d are multiplied and added in int32.

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

#include "allowed.h"
#include "each.h"
#include "formats.h"

#if defined(__AVX512BW__)
#define WIDE 16
#else
#define WIDE 8
#endif
#define CAT(a, b) a##b
#define NAMED(name, lanes) CAT(name, lanes)

namespace {

constexpr int LANES = WIDE, PANEL = 16, PARTS = PANEL / LANES;
constexpr int ROWS = 6;      // of a tile, at most
constexpr int BLOCK = 192;   // rows that are widened at a time: their weights are read once
constexpr int AHEAD = 4096;  // bytes of a panel that are fetched ahead of their use
constexpr int SOME = 4;      // panels that a thread takes at a time
constexpr int64_t PIECE = 256;  // steps of depth at a time: 4 panels of them take 64 KiB in float32

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Shorts __attribute__((vector_size(LANES * 2)));

template <class V>
V load(const void* at) {
  V value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

template <class V>
void store(void* at, V value) {
  std::memcpy(at, &value, sizeof value);
}

// What activations are: widened to float32 as they are read, rounded once, to even, as they are written.
struct BFloat16 {
  typedef uint16_t Kept;
  static Floats widen(const Kept* at) { return (Floats)(__builtin_convertvector(load<Shorts>(at), Words) << 16); }
  static void narrow(Kept* at, Floats value) {
    Words bits = (Words)value;
    Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Words chosen = value == value ? rounded : (bits >> 16) | 0x40;
    store(at, __builtin_convertvector(chosen, Shorts));
  }
};

struct Float16 {
  typedef uint16_t Kept;
#if WIDE == 16
  static Floats widen(const Kept* at) { return (Floats)_mm512_cvtph_ps(load<__m256i>(at)); }
  static void narrow(Kept* at, Floats value) { store(at, _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT)); }
#else
  static Floats widen(const Kept* at) { return (Floats)_mm256_cvtph_ps(load<__m128i>(at)); }
  static void narrow(Kept* at, Floats value) { store(at, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT)); }
#endif
};

struct Float32 {
  typedef float Kept;
  static Floats widen(const Kept* at) { return load<Floats>(at); }
  static void narrow(Kept* at, Floats value) { store(at, value); }
};

// How weights are multiplied: what is kept of them, a row of activations made ready, a sum, and what is made of it.
template <class Format>
struct Plain {
  typedef Format Out;
  typedef typename Format::Kept Weight;
  typedef float Ready;
  typedef Floats Sum;
  static constexpr int DEEP = 1, APART = 1;  // d of a step; numbers of the weight between neighbouring features

  static float ready(const typename Format::Kept* x, int64_t depth, Ready* row) {
    int64_t d = 0;
    for (; d + LANES <= depth; d += LANES) store(row + d, Format::widen(x + d));
    if (d < depth) {
      typename Format::Kept rest[LANES] = {};
      std::copy(x + d, x + depth, rest);
      Floats last = Format::widen(rest);
      std::memcpy(row + d, &last, (depth - d) * sizeof(Ready));
    }
    return 1;
  }
  static Sum spread(Ready one) { return one - Sum{}; }
  static Sum widen(const Weight* at) { return Format::widen(at); }
  static Sum add(Sum sum, Sum weight, Sum x) { return sum + weight * x; }
  static Floats result(Sum sum, float, const float*, int64_t) { return sum; }
};

// Rows in steps of a 127th of their largest number, two neighbouring d as one word.
template <class Format>
struct Quantized {
  typedef Format Out;
  typedef int8_t Weight;
  typedef int32_t Ready;
  typedef Ints Sum;
  static constexpr int DEEP = 2, APART = 2;

  static float ready(const typename Format::Kept* x, int64_t depth, Ready* row) {
    int16_t* q = reinterpret_cast<int16_t*>(row);
    float wide[LANES];
    float peak = 0;
    bool known = true;
    for (int64_t at = 0; at < depth; at += LANES) {
      const int count = taken(x, at, depth, wide);
      for (int j = 0; j < count; j++) {
        peak = std::max(peak, std::fabs(wide[j]));
        known &= wide[j] == wide[j];
      }
    }
    const float step = known ? peak / 127 : NAN;
    for (int64_t at = 0; at < depth; at += LANES) {
      const int count = taken(x, at, depth, wide);
      for (int j = 0; j < count; j++) {
        const float steps = std::nearbyint(wide[j] / step);
        q[at + j] = std::fabs(steps) <= 127 ? static_cast<int16_t>(steps) : 0;  // not where there is no step
      }
    }
    return step;
  }
  static int taken(const typename Format::Kept* x, int64_t at, int64_t depth, float* wide) {
    const int count = static_cast<int>(std::min<int64_t>(LANES, depth - at));
    typename Format::Kept some[LANES] = {};
    std::copy(x + at, x + at + count, some);
    store(wide, Format::widen(some));
    return count;
  }
#if WIDE == 16
  static Sum spread(Ready one) { return (Sum)_mm512_set1_epi32(one); }
  static Sum widen(const Weight* at) { return (Sum)_mm512_cvtepi8_epi16(load<__m256i>(at)); }
  static Sum add(Sum sum, Sum weight, Sum x) { return sum + (Sum)_mm512_madd_epi16((__m512i)weight, (__m512i)x); }
#else
  static Sum spread(Ready one) { return (Sum)_mm256_set1_epi32(one); }
  static Sum widen(const Weight* at) { return (Sum)_mm256_cvtepi8_epi16(load<__m128i>(at)); }
  static Sum add(Sum sum, Sum weight, Sum x) { return sum + (Sum)_mm256_madd_epi16((__m256i)weight, (__m256i)x); }
#endif
  static Floats result(Sum sum, float step, const float* scale, int64_t feature) {
    return __builtin_convertvector(sum, Floats) * step * load<Floats>(scale + feature);
  }
};

// A call: strides count numbers.  Group g has its own rows of `x` and `out`, and its own weight.
struct Call {
  const void* x;
  int64_t x_group, x_row;
  const void* weight;
  int64_t weight_group, panel, step;
  const float* scale;  // [groups, features] beside 8-bit weights
  void* out;
  int64_t out_group, out_row;
  const int64_t* counts;  // rows of each group, one group behind the other; or none, and each has `rows`
  int64_t groups, rows, features, depth, threads;
};

// Panels that are multiplied together: `count` of them, `apart` panels from each other, from number `first` on.
struct Panels {
  int64_t first, apart;
  int count;
};

// The n-th such of panels `first` to `last`.  Packed ones are taken from as many places as there are sums for, in each of
// which they follow each other: so memory is read in few long runs, however short a panel is, and what comes behind what is
// read is what is read next.  Of rows that hold a part of each panel, neighbours are taken, which lie in one line.
inline Panels taken(const Call& call, int64_t first, int64_t last, int64_t n) {
  const int64_t runs = (last - first) / SOME;
  if (n >= runs) return {first + runs * SOME, 1, n == runs ? static_cast<int>((last - first) % SOME) : 0};
  return call.panel > call.step ? Panels{first + n, runs, SOME} : Panels{first + n * SOME, 1, SOME};
}

// R rows by P panels, over `count` steps of depth: what they add to `sums`.  Weights that are `FRESH` come from memory
// and are fetched ahead; strips behind find them in the cache, and one instruction more a step takes up to a tenth more.
template <class Kind, int R, int P, bool FRESH>
void tile(const typename Kind::Ready* x, int64_t row, int64_t count, const typename Kind::Weight* w, int64_t panel,
          int64_t step, typename Kind::Sum (*sums)[SOME][PARTS]) {
  typename Kind::Sum sum[R][P][PARTS];
  for (int r = 0; r < R; r++)
    for (int p = 0; p < P; p++)
      for (int h = 0; h < PARTS; h++) sum[r][p][h] = sums[r][p][h];
#pragma GCC unroll 4
  for (int64_t d = 0; d < count; d++) {
    typename Kind::Sum part[P][PARTS];
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) {
      const typename Kind::Weight* at = w + p * panel + d * step;
      if (FRESH) __builtin_prefetch(reinterpret_cast<const char*>(at) + AHEAD);
#pragma GCC unroll 2
      for (int h = 0; h < PARTS; h++) part[p][h] = Kind::widen(at + h * LANES * Kind::APART);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      const typename Kind::Sum one = Kind::spread(x[r * row + d]);
#pragma GCC unroll 4
      for (int p = 0; p < P; p++)
#pragma GCC unroll 2
        for (int h = 0; h < PARTS; h++) sum[r][p][h] = Kind::add(sum[r][p][h], part[p][h], one);
    }
  }
  for (int r = 0; r < R; r++)
    for (int p = 0; p < P; p++)
      for (int h = 0; h < PARTS; h++) sums[r][p][h] = sum[r][p][h];
}

// R rows by `panels` panels, `panel` numbers from each other, as many at a time as there are registers for.
template <class Kind, int R, bool FRESH>
void strip(const typename Kind::Ready* x, int64_t row, int64_t count, const typename Kind::Weight* w, int64_t panel,
           int64_t step, int panels, typename Kind::Sum (*sums)[SOME][PARTS]) {
  constexpr int P = LANES == 16 || R == 1 ? 4 : R <= 3 ? 2 : 1;
  const auto from = [&](int p) { return reinterpret_cast<typename Kind::Sum(*)[SOME][PARTS]>(&sums[0][p]); };
  int p = 0;
  for (; p + P <= panels; p += P) tile<Kind, R, P, FRESH>(x, row, count, w + p * panel, panel, step, from(p));
  for (; p < panels; p++) tile<Kind, R, 1, FRESH>(x, row, count, w + p * panel, panel, step, from(p));
}

// Rows that are ready, by some panels of a group: piece after piece of depth, so that those of the weights stay in the
// cache while all rows go by.  Meanwhile the next piece is fetched, that of the panels `then` behind the last, a part for
// each strip: so memory is read beside the products.
template <class Kind>
void block(const Call& call, const typename Kind::Ready* x, int64_t row, int64_t rows, const float* steps,
           const typename Kind::Weight* weight, int64_t group, Panels some, Panels then,
           typename Kind::Out::Kept* out) {
  constexpr decltype(&strip<Kind, 1, true>) FIRST[] = {strip<Kind, 1, true>, strip<Kind, 2, true>,
                                                       strip<Kind, 3, true>, strip<Kind, 4, true>,
                                                       strip<Kind, 5, true>, strip<Kind, 6, true>};
  // Of several strips, which share rows out equally, none has less than three.
  constexpr decltype(&strip<Kind, 1, true>) BEHIND[] = {strip<Kind, 3, false>, strip<Kind, 4, false>,
                                                        strip<Kind, 5, false>, strip<Kind, 6, false>};
  typename Kind::Sum sums[BLOCK][SOME][PARTS];
  std::memset(sums, 0, rows * sizeof sums[0]);
  const auto* w = weight + some.first * call.panel;
  const int64_t depth = call.depth / Kind::DEEP, strips = (rows + ROWS - 1) / ROWS, panel = some.apart * call.panel;
  const int64_t piece = strips == 1 ? std::max<int64_t>(depth, 1) : PIECE;  // one strip has no use for it again
  for (int64_t d = 0; d < depth; d += piece) {
    const bool last = d + piece >= depth;
    const auto* next = last ? weight + then.first * call.panel : w + (d + piece) * call.step;
    const Panels& fetched = last ? then : some;
    const int64_t ahead = strips == 1 ? 0 : std::min(piece, last ? depth : depth - d - piece);
    for (int64_t s = 0; s < strips; s++) {
      for (int64_t i = ahead * s / strips; i < ahead * (s + 1) / strips; i++)
        for (int p = 0; p < fetched.count; p++)
          __builtin_prefetch(next + p * fetched.apart * call.panel + i * call.step, 0, 2);
      const int64_t t = rows * s / strips, r = rows * (s + 1) / strips - t;
      const auto by = s == 0 ? FIRST[r - 1] : BEHIND[r - 3];
      by(x + t * row + d, row, std::min(piece, depth - d), w + d * call.step, panel, call.step, some.count, sums + t);
    }
  }
  for (int64_t t = 0; t < rows; t++)
    for (int p = 0; p < some.count; p++)
      for (int h = 0; h < PARTS; h++) {
        const int64_t f = (some.first + p * some.apart) * PANEL + h * LANES;
        Kind::Out::narrow(out + t * call.out_row + f,
                          Kind::result(sums[t][p][h], steps[t], call.scale, group * call.features + f));
      }
}

// Numbers between ready rows: a line more than depth, so that a column of a power of two lies in other sets of the cache.
template <class Kind>
int64_t apart(const Call& call) {
  constexpr int64_t LINE = 64 / sizeof(typename Kind::Ready);
  return call.depth / Kind::DEEP + LINE;
}

// Panels `first` to `last` of a group, for its rows from `start` on.
template <class Kind>
void part(const Call& call, int64_t group, int64_t start, int64_t rows, int64_t first, int64_t last,
          typename Kind::Ready* ready) {
  typedef typename Kind::Out::Kept Kept;
  const Kept* x = static_cast<const Kept*>(call.x) + group * call.x_group + start * call.x_row;
  Kept* out = static_cast<Kept*>(call.out) + group * call.out_group + start * call.out_row;
  const auto* weight = static_cast<const typename Kind::Weight*>(call.weight) + group * call.weight_group;
  const int64_t row = apart<Kind>(call);
  float steps[BLOCK];
  for (int64_t at = 0; at < rows; at += BLOCK) {
    const int64_t count = std::min<int64_t>(BLOCK, rows - at);
    for (int64_t t = 0; t < count; t++) steps[t] = Kind::ready(x + (at + t) * call.x_row, call.depth, ready + t * row);
    Panels some = taken(call, first, last, 0);
    for (int64_t n = 1; some.count; n++) {
      const Panels then = taken(call, first, last, n);
      block<Kind>(call, ready, row, count, steps, weight, group, some, then, out + at * call.out_row);
      some = then;
    }
  }
}

// Equal runs of the work for each thread: of all panels of all groups, each as long as its group has rows.
template <class Kind>
void product(const Call& call) {
  const int64_t panels = call.features / PANEL;
  int64_t total = 0, most = 0;
  for (int64_t g = 0; g < call.groups; g++) {
    const int64_t rows = call.counts ? call.counts[g] : call.rows;
    total += rows * panels;
    most = std::max(most, rows);
  }
#pragma omp parallel num_threads(crew(total * PANEL * call.depth, call.threads))
  {
    const int64_t room = std::min<int64_t>(BLOCK, most) * apart<Kind>(call);
    const std::unique_ptr<typename Kind::Ready[]> ready(new typename Kind::Ready[std::max<int64_t>(room, 1)]);
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t from = total * thread / threads, to = total * (thread + 1) / threads;
    int64_t before = 0, start = 0;
    for (int64_t g = 0; g < call.groups; g++) {
      const int64_t rows = call.counts ? call.counts[g] : call.rows;
      // The first panel of the group that begins at this row of the work, or behind it.
      const auto panel = [&](int64_t row) {
        return rows ? std::clamp<int64_t>((row - before + rows - 1) / rows, 0, panels) : 0;
      };
      const int64_t first = panel(from), last = panel(to);
      if (first < last) part<Kind>(call, g, start, rows, first, last, ready.get());
      before += rows * panels;
      if (call.counts) start += rows;
    }
  }
}

// Of `units` (the numbers that lie together, 2 or 4 bytes of them) [features, depth], panels [features / 16, depth, 16].
template <class Unit>
void pack(const Unit* from, Unit* to, int64_t features, int64_t depth, int64_t threads) {
  constexpr int64_t LINE = 64 / sizeof(Unit);  // read and written a cache line at a time
#pragma omp parallel for num_threads(crew(features * depth, threads))
  for (int64_t f = 0; f < features; f += PANEL)
    for (int64_t at = 0; at < depth; at += LINE)
      for (int64_t j = 0; j < PANEL; j++)
        for (int64_t d = at; d < std::min(at + LINE, depth); d++) to[f * depth + d * PANEL + j] = from[(f + j) * depth + d];
}

}  // namespace

// `format` of the activations; the weight is in the same one, or, beside scales, int8.
static void NAMED(mla_fx_linear_, WIDE)(
    int format, const void* x, int64_t x_group, int64_t x_row, const void* weight, int64_t weight_group, int64_t panel,
    int64_t step, const float* scale, void* out, int64_t out_group, int64_t out_row, const int64_t* counts,
    int64_t groups, int64_t rows, int64_t features, int64_t depth, int64_t threads) {
  const Call call{x,       x_group, x_row,  weight, weight_group, panel,    step,  scale,  out, out_group,
                  out_row, counts,  groups, rows,   features,     depth,    threads};
  switch (format) {
    case BFLOAT16: return scale ? product<Quantized<BFloat16>>(call) : product<Plain<BFloat16>>(call);
    case FLOAT16: return scale ? product<Quantized<Float16>>(call) : product<Plain<Float16>>(call);
    case FLOAT32: return scale ? product<Quantized<Float32>>(call) : product<Plain<Float32>>(call);
  }
}

// `unit`: the bytes of a feature that lie together in a panel, 2 or 4.
static void NAMED(mla_fx_pack_, WIDE)(int unit, const void* from, void* to, int64_t features, int64_t depth,
                                      int64_t threads) {
  if (unit == 2) pack(static_cast<const uint16_t*>(from), static_cast<uint16_t*>(to), features, depth, threads);
  if (unit == 4) pack(static_cast<const uint32_t*>(from), static_cast<uint32_t*>(to), features, depth, threads);
}

EACH(NAMED(mla_fx_linear_, WIDE))
EACH(NAMED(mla_fx_pack_, WIDE))
