// What Python asks for: attention of every request's rows over that request's keys.
//
// A row is the query of one head of one token.  The rows of a request follow each other, token by token.  Keys lie in
// blocks of a cache, which a table names (history), or are the new tokens' own, in order, each seen by its own token
// and later ones (current: `keys` is null, and so is `table`).

#pragma once

#include "formats.h"

enum Engine { FMA = 1, AVX512_BF16 = 2, AMX = 4 };

struct Call {
  int format;                              // of queries, keys and `out`
  const void *q_latent, *q_rope;           // [tokens, heads, latent], [tokens, heads, rope], in one piece
  const void *k_latent, *k_rope;           // features in one piece; the strides are in numbers
  long latent_block, latent_row, rope_block, rope_row;
  const int* table;                        // [requests, table_row], the blocks of each
  long table_row, block;                   // keys in a block
  const long *queries, *keys;              // [requests]: new tokens, cached keys
  long requests, tokens, heads, latent, rope;
  float scale;
  void* out;                               // [tokens, heads, latent]; 0 for a row that has no key
  float* lse;                              // [tokens, heads], natural logarithm; -inf for a row that has no key
  int threads;                             // at most
};

// One for each set of instructions; a unit defines it by attend_all of divide.h.
void attend_fma8(const Call&);
void attend_fma16(const Call&);
void attend_avx512_bf16(const Call&);  // for bf16, latent and rope multiples of 32
void attend_amx(const Call&);          // likewise
