// Rules that touch every number once: a library needs several passes and calls for each, and in a decode step of few
// rows a call costs more than the numbers.  In float32, rounded once; a row is the same whatever is beside it.

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <memory>

#include "allowed.h"
#include "each.h"
#include "formats.h"

namespace {

constexpr int LANES = 8, PIECE = 512;

struct BFloat16 {
  uint16_t bits;
  operator float() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
  }
  static BFloat16 of(float value) {  // to even; what is no number stays none
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    const uint32_t rounded = value == value ? wide + 0x7fff + (wide >> 16 & 1) : wide | 0x400000;
    return {static_cast<uint16_t>(rounded >> 16)};
  }
};

struct Float16 {
  _Float16 value;
  operator float() const { return value; }
  static Float16 of(float value) { return {static_cast<_Float16>(value)}; }
};

struct Float32 {
  float value;
  operator float() const { return value; }
  static Float32 of(float value) { return {value}; }
};

template <class T>
void rms_norm(const T* x, int64_t x_row, const T* weight, T* out, int64_t rows, int64_t features, float epsilon,
              int threads) {
#pragma omp parallel for num_threads(crew(rows * features, threads))
  for (int64_t t = 0; t < rows; t++) {
    const T* row = x + t * x_row;
    float squares[LANES] = {}, total = 0;
    int64_t d = 0;
    for (; d + LANES <= features; d += LANES)
      for (int j = 0; j < LANES; j++) squares[j] += row[d + j] * row[d + j];
    for (; d < features; d++) squares[0] += row[d] * row[d];
    for (int j = 0; j < LANES; j++) total += squares[j];
    const float factor = 1 / sqrtf(total / features + epsilon);
    for (d = 0; d < features; d++) out[t * features + d] = T::of(row[d] * factor * weight[d]);
  }
}

inline float power_of_two(int n) {
  const int32_t bits = (n + 127) << 23;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// e^x as 2^n p(x - n log 2), with the polynomial of Cephes' expf, good to 2 units in the last place: a library's is not
// computed for several numbers at once.  0 below the smallest float and of what is no number, infinite above the largest.
inline float exponential(float x) {
  x = x > -104 ? (x < 89 ? x : 89) : -104;
  const float n = (x * 1.44269504f + 12582912) - 12582912;  // 1.5 * 2^23: what is behind the point is rounded away
  const float r = x - n * 0.693359375f + n * 2.12194440e-4f;  // log 2 in two parts, n times the first is exact
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const int whole = static_cast<int>(n), half = whole / 2;  // 2^n in two factors, either of which is a float
  return (p * r * r + r + 1) * power_of_two(half) * power_of_two(whole - half);
}

template <class T>
void swiglu(const T* x, int64_t x_row, T* out, int64_t rows, int64_t features, int threads) {
#pragma omp parallel for num_threads(crew(rows * features, threads))
  for (int64_t t = 0; t < rows; t++) {
    const T *gate = x + t * x_row, *up = gate + features;
    for (int64_t f = 0; f < features; f++) {
      const float a = gate[f];
      out[t * features + f] = T::of(a / (1 + exponential(-a)) * up[f]);
    }
  }
}

// The last `features` of each head, of neighbours a pair; angles [rows, features] for both halves of the result.
template <class T>
void rope(const T* x, int64_t x_row, int64_t x_head, const float* cosine, const float* sine, T* out, int64_t rows,
          int64_t heads, int64_t features, int threads) {
#pragma omp parallel for num_threads(crew(rows * heads * features, threads))
  for (int64_t t = 0; t < rows; t++)
    for (int64_t h = 0; h < heads; h++) {
      const T* pairs = x + t * x_row + (h + 1) * x_head - features;
      const float *c = cosine + t * features, *s = sine + t * features;
      T* to = out + (t * heads + h) * features;
      const int64_t half = features / 2;
      for (int64_t i = 0; i < half; i++) {
        const float a = pairs[2 * i], b = pairs[2 * i + 1];
        to[i] = T::of(a * c[i] - b * s[i]);
        to[half + i] = T::of(b * c[half + i] + a * s[half + i]);
      }
    }
}

template <class T>
void unpermute(const T* rows, int64_t row, const int32_t* source, const float* weights, T* out, int64_t tokens,
               int64_t top, int64_t features, int threads) {
#pragma omp parallel for num_threads(crew(tokens * features * top, threads))
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t at = 0; at < features; at += PIECE) {
      const int64_t count = features - at < PIECE ? features - at : PIECE;
      float sum[PIECE] = {};
      for (int64_t u = 0; u < top; u++) {
        const int64_t g = source[t * top + u];
        if (g < 0) continue;
        const T* part = rows + g * row + at;
        const float weight = weights[t * top + u];
        for (int64_t d = 0; d < count; d++) sum[d] += weight * part[d];
      }
      for (int64_t d = 0; d < count; d++) out[t * features + at + d] = T::of(sum[d]);
    }
}

// The parts of `ranks` ranks and the local one, weighed by their LSEs; one whose LSE is infinite saw no key and is not read.
template <class T>
void combine(const T* recv, int64_t recv_rank, const float* recv_lse, int64_t lse_rank, const T* local,
             const float* local_lse, T* out, int64_t ranks, int64_t rows, int64_t features, int threads) {
#pragma omp parallel num_threads(crew((ranks + 1) * rows * features, threads))
  {
    std::unique_ptr<float[]> weights(new float[ranks + 1]);
#pragma omp for
    for (int64_t row = 0; row < rows; row++) {
      const auto lse = [&](int64_t i) { return i < ranks ? recv_lse[i * lse_rank + row] : local_lse[row]; };
      float top = -INFINITY, total = 0;
      for (int64_t i = 0; i <= ranks; i++) top = !isinf(lse(i)) && lse(i) > top ? lse(i) : top;
      for (int64_t i = 0; i <= ranks; i++) total += weights[i] = isinf(lse(i)) ? 0 : expf(lse(i) - top);
      for (int64_t at = 0; at < features; at += PIECE) {
        const int64_t count = features - at < PIECE ? features - at : PIECE;
        float sum[PIECE] = {};
        for (int64_t i = 0; i <= ranks; i++) {
          if (isinf(lse(i))) continue;
          const T* part = (i < ranks ? recv + i * recv_rank : local) + row * features + at;
          const float weight = weights[i] / total;
          for (int64_t d = 0; d < count; d++) sum[d] += weight * part[d];
        }
        for (int64_t d = 0; d < count; d++) out[row * features + at + d] = T::of(sum[d]);
      }
    }
  }
}

// The sum of what ranks have, in their order.
template <class T>
void sum(const T* parts, int64_t apart, T* out, int64_t ranks, int64_t count, int threads) {
#pragma omp parallel for num_threads(crew(ranks * count, threads))
  for (int64_t at = 0; at < count; at += PIECE) {
    const int64_t some = count - at < PIECE ? count - at : PIECE;
    float total[PIECE];
    for (int64_t d = 0; d < some; d++) total[d] = parts[at + d];
    for (int64_t i = 1; i < ranks; i++)
      for (int64_t d = 0; d < some; d++) total[d] += parts[i * apart + at + d];
    for (int64_t d = 0; d < some; d++) out[at + d] = T::of(total[d]);
  }
}

// A function of a format, by its number.
template <class Function>
void with(int format, Function function) {
  if (format == BFLOAT16) function(BFloat16{});
  if (format == FLOAT16) function(Float16{});
  if (format == FLOAT32) function(Float32{});
}

template <class T>
const T* in(const void* at, T) {
  return static_cast<const T*>(at);
}
template <class T>
T* out_to(void* at, T) {
  return static_cast<T*>(at);
}

}  // namespace

// Strides count numbers; what has none lies row after row.

static void mla_fx_rms_norm(int format, const void* x, int64_t x_row, const void* weight, void* out, int64_t rows,
                            int64_t features, float epsilon, int threads) {
  with(format, [&](auto kind) {
    rms_norm(in(x, kind), x_row, in(weight, kind), out_to(out, kind), rows, features, epsilon, threads);
  });
}

static void mla_fx_swiglu(int format, const void* x, int64_t x_row, void* out, int64_t rows, int64_t features,
                          int threads) {
  with(format, [&](auto kind) { swiglu(in(x, kind), x_row, out_to(out, kind), rows, features, threads); });
}

static void mla_fx_rope(int format, const void* x, int64_t x_row, int64_t x_head, const float* cosine,
                        const float* sine, void* out, int64_t rows, int64_t heads, int64_t features, int threads) {
  with(format, [&](auto kind) {
    rope(in(x, kind), x_row, x_head, cosine, sine, out_to(out, kind), rows, heads, features, threads);
  });
}

static void mla_fx_unpermute(int format, const void* rows, int64_t row, const int32_t* source, const float* weights,
                             void* out, int64_t tokens, int64_t top, int64_t features, int threads) {
  with(format, [&](auto kind) {
    unpermute(in(rows, kind), row, source, weights, out_to(out, kind), tokens, top, features, threads);
  });
}

static void mla_fx_combine(int format, const void* recv, int64_t recv_rank, const float* recv_lse, int64_t lse_rank,
                           const void* local, const float* local_lse, void* out, int64_t ranks, int64_t rows,
                           int64_t features, int threads) {
  with(format, [&](auto kind) {
    combine(in(recv, kind), recv_rank, recv_lse, lse_rank, in(local, kind), local_lse, out_to(out, kind), ranks, rows,
            features, threads);
  });
}

static void mla_fx_sum(int format, const void* parts, int64_t apart, void* out, int64_t ranks, int64_t count,
                       int threads) {
  with(format, [&](auto kind) { sum(in(parts, kind), apart, out_to(out, kind), ranks, count, threads); });
}

// The rows of a table that tokens name, of those `held` from `first` on; zeros for others.  Rows of so many bytes.
static void mla_fx_embedding(const int64_t* tokens, const char* table, Own first, Own held, char* out, int64_t rows,
                             int64_t row) {
  for (int64_t t = 0; t < rows; t++) {
    const int64_t at = tokens[t] - first;
    if (at >= 0 && at < held) memcpy(out + t * row, table + at * row, row);
    else memset(out + t * row, 0, row);
  }
}

// Rows whose slot is not -1, where their slot is in a cache of `size` slots; rows of so many bytes.  Gives the first slot
// that is not in it, with nothing written, or -1.
static int64_t mla_fx_write_rows(char* cache, const char* rows, const int64_t* slots, int64_t count, int64_t size,
                                 int64_t row) {
  for (int64_t t = 0; t < count; t++)
    if (slots[t] >= size) return t;
  for (int64_t t = 0; t < count; t++)
    if (slots[t] >= 0) memcpy(cache + slots[t] * row, rows + t * row, row);
  return -1;
}

// Pairs of tokens and experts from `first` on sorted by expert, `counts` [own]; rows of so many bytes.
static void mla_fx_permute(const void* x, int64_t x_row, const int32_t* experts, Own first, int64_t own,
                           void* rows, int64_t* counts, int32_t* source, int64_t tokens, int64_t top, int64_t row) {
  const std::unique_ptr<int64_t[]> begins(new int64_t[own]);
  for (int64_t y = 0; y < own; y++) counts[y] = 0;
  for (int64_t pair = 0; pair < tokens * top; pair++) {
    const int64_t y = experts[pair] - first;
    if (y >= 0 && y < own) counts[y]++;
  }
  for (int64_t y = 0, begin = 0; y < own; y++) {
    begins[y] = begin;
    begin += counts[y];
  }
  for (int64_t pair = 0; pair < tokens * top; pair++) {
    const int64_t y = experts[pair] - first;
    source[pair] = -1;
    if (y < 0 || y >= own) continue;
    const int64_t g = begins[y]++;
    source[pair] = static_cast<int32_t>(g);
    memcpy(static_cast<char*>(rows) + g * row, static_cast<const char*>(x) + pair / top * x_row, row);
  }
}

// What each of `ranks` ranks is sent: its heads' outputs, `out` bytes of a token, and at the end of `size` bytes its LSEs.
static void mla_fx_pack(const char* outs, const char* lses, char* payload, int64_t tokens, int64_t ranks, int64_t out,
                        int64_t lse, int64_t size, int threads) {
  const int64_t turns = tokens * ranks;
  const auto lay = [=](int64_t turn) {
    const int64_t r = turn / tokens, t = turn % tokens, from = t * ranks + r;
    char* part = payload + r * size;
    memcpy(part + t * out, outs + from * out, out);
    memcpy(part + size - (tokens - t) * lse, lses + from * lse, lse);
  };
  threads = crew(turns * out, threads);
  if (threads > 1) {
#pragma omp parallel for num_threads(threads)
    for (int64_t turn = 0; turn < turns; turn++) lay(turn);
  } else {  // a region, of one thread too, takes a quarter of what the heads of a token do
    for (int64_t turn = 0; turn < turns; turn++) lay(turn);
  }
}

EACH(mla_fx_rms_norm)
EACH(mla_fx_swiglu)
EACH(mla_fx_rope)
EACH(mla_fx_unpermute)
EACH(mla_fx_combine)
EACH(mla_fx_sum)
EACH(mla_fx_pack)
EACH(mla_fx_permute)
EACH(mla_fx_embedding)
EACH(mla_fx_write_rows)
