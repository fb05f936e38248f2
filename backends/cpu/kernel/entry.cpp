// What Python calls.  Compiled for any x86-64: nothing here may use what a processor need not have.

#include "call.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
}
}  // namespace

// The engines that this processor has, a bit for each.
EXPORT int mla_fx_engines() {
  __builtin_cpu_init();
  bool fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  return fma ? 1 : 0;
}

// See Call.  `engine` is one bit of mla_fx_engines.
EXPORT void mla_fx_attend(int engine, int kind, const void* q_latent, const void* q_rope, const void* k_latent,
                          const void* k_rope, long latent_block, long latent_row, long rope_block, long rope_row,
                          const int* table, long table_row, long block, const long* queries, const long* keys,
                          long requests, long tokens, long heads, long latent, long rope, float scale, void* out,
                          float* lse, int threads) {
  Call call = {kind, q_latent, q_rope, k_latent, k_rope, latent_block, latent_row, rope_block, rope_row, table,
               table_row, block, queries, keys, requests, tokens, heads, latent, rope, scale, out, lse, threads};
  (void)engine;
  has_avx512() ? attend_fma16(call) : attend_fma8(call);
}
