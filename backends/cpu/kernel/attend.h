// Attention over a request's keys, tile by tile, as a template over an engine: what multiplies, in which numbers.
//
// Scores are computed transposed, S[key][row], so that softmax runs down columns, with rows in lanes and nothing across
// lanes.  They lie in panels of rows, each [keys of a tile][rows of the panel].  With s in base 2, m the running
// maximum of a row, z its sum and o its accumulator,
//
//   m' = max(m, max_k s[k])     p[k] = 2^(s[k] - m')     z' = 2^(m - m') z + sum_k p[k]     o' = 2^(m - m') o + p C
//
// and rows whose maximum stays are not rescaled.  Source: online softmax (Milakov and Gimelshein, arXiv 1805.02867).
//
// An engine E of numbers E::Number, and what serves few rows E::Few (narrow.h), has
//   lanes of rows in multiples of LANES; `panel`, the most rows of a panel, LANES or twice that; `tile`, keys at a time;
//     `group`, by which a tile's keys are rounded up, the added ones with score -inf;
//   floats(shape)            what it needs of memory, in floats; and a constructor with that memory
//   pack(rows)               the queries of at most ROWS rows, before anything else
//   scores(keys, at, n, s)   of n keys from `at` on, without the scale; rows of s behind n may be anything
//   take(weight, s, width, k, row)  `group` keys from k on, LANES rows from `row` on: softmax makes the i-th by weight(i)
//   values(n, first, o)      o (+)= P C for the keys that `scores` had last; assigned where `first`
//   write(o, factor, out)    one row of the result; o is as `values` has left it
#pragma once
#include "numbers.h"

namespace {

constexpr int ROWS = 128;  // that are handled together

struct Shape {
  int latent, rope;
  int features() const { return latent + rope; }
  int wide() const { return up_to(latent, 2 * LANES) + 16; }  // of a row of o; padded, or rows fall in the same sets
};

template <class T> struct Keys {  // of one request
  const T *latent, *rope;
  long latent_block, latent_row, rope_block, rope_row;
  const int* table;  // null: all in one block
  long block;
  const T* latent_of(long key) const { return latent + (table ? table[key / block] * latent_block + key % block * latent_row : key * latent_row); }
  const T* rope_of(long key) const { return rope + (table ? table[key / block] * rope_block + key % block * rope_row : key * rope_row); }
  long run(long key) const { return table ? block - key % block : 1l << 40; }  // keys that lie at equal distances from here on
  // Where n keys from `at` on lie.
  void find(long at, int n, const T** latents, const T** ropes) const {
    for (int k = 0; k < n;) {
      const T *l = latent_of(at + k), *r = rope_of(at + k);
      for (long left = run(at + k); left && k < n; left--, k++, l += latent_row, r += rope_row) latents[k] = l, ropes[k] = r;
    }
  }
};

template <class T> struct Rows {  // of one request
  const T *latent, *rope;  // the first one's; they follow each other
  int count;
  long first;  // its number among the request's
};

struct Sums {  // of a run of keys: o and z relative to the maximum m, which is in base 2
  float *o, *peak, *total;
  static long floats(Shape shape) { return long(ROWS) * (shape.wide() + 2); }
  Sums(float* memory, Shape shape) : o(memory), peak(memory + long(ROWS) * shape.wide()), total(peak + ROWS) {}
};

// Columns of LANES rows from `row` on, in a panel of W, of n keys: scores to what P C needs, with the running maximum and
// sum.
template <int W, class E> INLINE void softmax(E& e, float* s, int n, int row, float scale2, bool first, Sums sums, Shape shape) {
  Floats tops[4] = {all(-INF), all(-INF), all(-INF), all(-INF)};
  for (int k = 0; k < n; k += 4)
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) tops[i] = larger(load(s + (k + i) * W), tops[i]);
  Floats top = larger(larger(tops[0], tops[1]), larger(tops[2], tops[3])) * scale2;
  Floats before = {};
  if (!first) {
    Floats old = load(sums.peak + row);
    top = larger(top, old);
    Floats shrink = exp2(old - top);
    before = load(sums.total + row) * shrink;
    for (int i = 0; i < LANES; i++) {
      if (shrink[i] == 1) continue;
      float* o = sums.o + long(row + i) * shape.wide();
      for (int d = 0; d < shape.latent; d += LANES) store(o + d, load(o + d) * shrink[i]);
    }
  }
  store(sums.peak + row, top);
  Floats total = {};
  for (int k = 0; k < n; k += E::group) {
    auto weight = [&](int i) __attribute__((always_inline)) {
      Floats p = exp2(load(s + (k + i) * W) * scale2 - top);
      total += p;
      return p;
    };
    e.take(weight, s, W, k, row);
  }
  store(sums.total + row, before + total);
}

// Keys [from, to) of a request into `sums`.  `heads`: keys are the request's own new tokens, each seen by the heads of
// its own and later ones; 0: every row sees every key.
template <class E> void attend(E& e, const Keys<typename E::Number>& keys, long from, long to, const Rows<typename E::Number>& rows, long heads, float scale, float* s, Sums sums, Shape shape) {
  for (long at = from; at < to; at += E::tile) {
    int n = least(E::tile, to - at), padded = up_to(n, E::group);
    e.scores(keys, at, n, s);
    for (int row = 0, width; row < rows.count; row += width) {
      width = least(E::panel, up_to(rows.count - row, LANES));
      float* panel = s + long(row) * E::tile;
      for (int k = heads ? 0 : n; k < padded; k++) {
        long hidden = k >= n ? width : heads ? (at + k) * heads - rows.first - row : 0;  // rows before the key's token
        for (int i = 0; i < least(hidden, width); i++) panel[k * width + i] = -INF;
      }
      for (int i = 0; i < width; i += LANES)
        width == LANES ? softmax<LANES>(e, panel + i, padded, row + i, scale / LN2, at == from, sums, shape)
                       : softmax<E::panel>(e, panel + i, padded, row + i, scale / LN2, at == from, sums, shape);
    }
    e.values(n, at == from, sums.o);
  }
}

// Rows [begin, end) of `part` into `whole`, whose keys come before.
INLINE void merge(Sums whole, Sums part, int begin, int end, Shape shape) {
  for (int row = begin; row < end; row++) {
    float top = whole.peak[row] > part.peak[row] ? whole.peak[row] : part.peak[row];
    float a = exp2(whole.peak[row] - top), b = exp2(part.peak[row] - top);
    float *o = whole.o + long(row) * shape.wide(), *more = part.o + long(row) * shape.wide();
    whole.peak[row] = top;
    whole.total[row] = whole.total[row] * a + part.total[row] * b;
    for (int d = 0; d < shape.latent; d += LANES) store(o + d, load(o + d) * a + load(more + d) * b);
  }
}

}  // namespace
