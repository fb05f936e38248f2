// Engine of products of bf16 pairs, in registers of 512 bits: all but the products, which are a template's argument.
//
// Keys are the left operand of S = K Q, used where they lie in the cache; queries are packed once as the right one.
// P is rounded to bf16 and laid in rows, through a transpose of pairs of keys, as the left operand of P C.  Its right
// operand is packed 32 columns and a tile's keys at a time, in a buffer that stays in the L1 cache.  A right operand
// has its rows in pairs, [pairs][columns][2]: two numbers that follow each other on the left meet one element of a
// register.
//
// Latent and rope must be multiples of 32.  What lies behind the keys in their own block is read, dirties its own rows
// of S, and is left out of C.
#pragma once
#include "attend.h"

namespace {

constexpr int STEP = 32;          // keys that are used together, where they lie or as a copy
constexpr int COLUMNS = 32;       // of a packed right operand of P C
constexpr int P_ROW = 256 + 32;  // of P, in numbers, of at most 256 keys; padded, or rows fall in the same sets

struct Left {  // rows of a left operand, `features` (a multiple of 32) of each
  const Bf16* from;
  long row;
  int features;
};
INLINE Left below(Left a, int rows) { return {a.from + rows * a.row, a.row, a.features}; }

// 16 x 16 numbers of 32 bits, rows to columns: within 128 bits, then of 128 bits.
INLINE void transpose(__m512i* r) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + 2 + j]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + 2 + j]);
    }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    t[j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
    t[8 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
    t[12 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    r[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
    r[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
    r[4 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0x88);
    r[12 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0xdd);
  }
}

// A row of o, whose columns are in the order of unpacklo and unpackhi, as numbers in theirs.
INLINE void write_columns(Shape shape, const float* o, float factor, Bf16* out) {
  alignas(64) static const int LOWER[16] = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
  alignas(64) static const int UPPER[16] = {8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31};
  const __m512i lower = _mm512_load_si512(LOWER), upper = _mm512_load_si512(UPPER);
  for (int d = 0; d < shape.latent; d += 32) {
    const __m512 a = (__m512)(load(o + d) * factor), b = (__m512)(load(o + d + 16) * factor);
    _mm512_storeu_si512(out + d, (__m512i)_mm512_cvtne2ps_pbh(_mm512_permutex2var_ps(a, upper, b),
                                                              _mm512_permutex2var_ps(a, lower, b)));
  }
}

// Products has, beside a constructor and a destructor that run in the thread that computes,
//   tile                                    keys at a time: all that a tile needs is to stay in the L2 cache
//   Few                                     what serves few rows, as narrow.h does
//   scores(latent, rope, q, width, s)       s[STEP][width] = [latent, rope] q, width 16 or 32
//   values(rows, keys, p, v, o, wide, add)  o[rows][COLUMNS] (+)= p v, keys a multiple of 32; rows up to the next
//                                           multiple of 16 may be written
template <class Products> struct PairsOfBf16 {
  using Number = Bf16;
  using Few = typename Products::Few;
  static constexpr int panel = 2 * LANES, tile = Products::tile, group = STEP;

  Shape shape;
  Products products;
  Bf16 *q, *p, *v, *copy;     // packed queries [panel][feature pair][row][2]; P [row][key]; packed latents; copied keys
  Left latents[tile / STEP];  // of the last tile
  int keys = 0, count = 0;

  static long floats(Shape shape) { return (long(ROWS + tile) * shape.features() + ROWS * P_ROW + tile * COLUMNS) / 2; }
  PairsOfBf16(float* memory, Shape shape) : shape(shape), q((Bf16*)memory) {
    p = q + long(ROWS) * shape.features();
    v = p + ROWS * P_ROW;
    copy = v + tile * COLUMNS;
  }

  int width(int row) const { return least(panel, up_to(count - row, LANES)); }
  Bf16* packed(int row) const { return q + long(row) * shape.features(); }

  void pack(const Rows<Bf16>& rows) {
    count = rows.count;
    for (int row = 0; row < count; row += panel)
      for (int i = 0, w = width(row); i < w; i += LANES) {
        pack_lanes(rows.latent + long(row + i) * shape.latent, shape.latent, count - row - i, w, packed(row) + 2 * i);
        pack_lanes(rows.rope + long(row + i) * shape.rope, shape.rope, count - row - i, w,
                   packed(row) + shape.latent * w + 2 * i);
      }
  }
  // `rows` rows, at most LANES, of `features`, as columns of a right operand that has `w`; further columns are 0.
  static void pack_lanes(const Bf16* from, int features, int rows, int w, Bf16* to) {
    for (int f = 0; f < features; f += 32) {
      __m512i r[LANES];
      for (int i = 0; i < LANES; i++)
        r[i] = i < rows ? _mm512_loadu_si512(from + long(i) * features + f) : _mm512_setzero_si512();
      transpose(r);
      for (int i = 0; i < LANES; i++) _mm512_store_si512(to + long(f / 2 + i) * w * 2, r[i]);
    }
  }

  void scores(const Keys<Bf16>& all, long at, int n, float* s) {
    keys = n;
    for (int k = 0; k < n; k += STEP) {
      Left latent{all.latent_of(at + k), all.latent_row, shape.latent};
      Left rope{all.rope_of(at + k), all.rope_row, shape.rope};
      bool apart = all.run(at + k) < STEP || (!all.table && n - k < STEP);
      if (apart) copied(all, at + k, least(STEP, n - k), k, latent, rope);
      latents[k / STEP] = latent;
      for (int row = 0; row < count; row += panel)
        products.scores(latent, rope, packed(row), width(row), s + long(row) * tile + k * width(row));
    }
  }
  // `n` keys from `at` on that do not lie at equal distances, or have nothing of theirs behind them.
  void copied(const Keys<Bf16>& all, long at, int n, int k, Left& latent, Left& rope) {
    Bf16 *to = copy + long(k) * shape.features(), *rope_to = to + long(STEP) * shape.latent;
    for (int i = 0; i < n; i++) {
      memcpy(to + long(i) * shape.latent, all.latent_of(at + i), shape.latent * sizeof(Bf16));
      memcpy(rope_to + long(i) * shape.rope, all.rope_of(at + i), shape.rope * sizeof(Bf16));
    }
    latent = {to, shape.latent, shape.latent}, rope = {rope_to, shape.rope, shape.rope};
  }

  // 32 keys of 16 rows each to rows of 32 keys.  Bits of a key's number go from registers' to elements', where 3 is
  // first, as the upper half, then 0, 1, 2 and 4; of a row's number 2, 1, 0 and 3 become registers'.
  template <class F> INLINE void take(F weight, float*, int, int k, int row) {
    __m512i r[16], t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      const int key = i % 8 + i / 8 * 16;
      const __m512 lower = (__m512)weight(key), upper = (__m512)weight(key + 8);
      r[i] = (__m512i)_mm512_cvtne2ps_pbh(upper, lower);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_epi16(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_epi16(r[i], r[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      if (i & 2) continue;
      r[i] = _mm512_unpacklo_epi32(t[i], t[i + 2]);
      r[i + 2] = _mm512_unpackhi_epi32(t[i], t[i + 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      if (i & 4) continue;
      t[i] = _mm512_unpacklo_epi64(r[i], r[i + 4]);
      t[i + 4] = _mm512_unpackhi_epi64(r[i], r[i + 4]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      Bf16* to = p + (row + (i & 1) * 4 + (i & 2) + (i >> 2)) * P_ROW + k;
      _mm512_store_si512(to, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
      _mm512_store_si512(to + 8 * P_ROW, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
    }
  }

  void values(int, bool first, float* o) {
    for (int d = 0; d < shape.latent; d += COLUMNS) {
      for (int k = 0; k < keys; k += STEP) pack_values(latents[k / STEP], d, keys - k, v + k * COLUMNS);
      products.values(count, up_to(keys, STEP), p, v, o + d, shape.wide(), !first);
    }
  }
  // COLUMNS columns of STEP keys, of which `real` count and the others are 0, whatever lies there.  The columns come in
  // the order of unpacklo and unpackhi, which `write_columns` undoes.
  static void pack_values(Left c, int d, int real, Bf16* to) {
    const auto pair = [&](__m512i a, __m512i b) __attribute__((always_inline)) {
      _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
      _mm512_store_si512(to + COLUMNS, _mm512_unpackhi_epi16(a, b));
      to += 2 * COLUMNS;
    };
    const Bf16* from = c.from + d;
    int i = 0;
    for (; i + 2 <= least(real, STEP); i += 2, from += 2 * c.row)
      pair(_mm512_loadu_si512(from), _mm512_loadu_si512(from + c.row));
    if (i < STEP && i < real) pair(_mm512_loadu_si512(from), _mm512_setzero_si512()), i += 2;
    for (; i < STEP; i += 2) pair(_mm512_setzero_si512(), _mm512_setzero_si512());
  }

  void write(const float* o, float factor, Bf16* out) const { write_columns(shape, o, factor, out); }
};

}  // namespace
