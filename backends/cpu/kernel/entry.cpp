// What Python calls.  Compiled for any x86-64: nothing here may use what a processor need not have.

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "allowed.h"
#include "call.h"
#include "each.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

// Tiles and their products of bf16, by leaf 7 of cpuid; and the system's permission to use them, which it gives to the
// process once it is asked (ARCH_REQ_XCOMP_PERM for XTILEDATA, Linux 5.16 on), and without which they are an illegal
// instruction.
bool has_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return false;
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}

const pid_t STARTED = getpid();

// The first request whose new tokens are not among those there are, or whose keys are not in blocks of a cache of so
// many; -1 where there is none.
int64_t unfit(const Call& call, long blocks) {
  long end = 0;
  for (long b = 0; b < call.requests; b++) {
    const long queries = call.queries[b], keys = call.keys ? call.keys[b] : 0;
    if (queries < 0 || queries > call.tokens - end || keys < 0) return b;
    end += queries;
    if (!queries || !keys) continue;
    if ((keys - 1) / call.block >= call.table_row) return b;
    const int* table = call.table + b * call.table_row;
    for (long i = 0; i <= (keys - 1) / call.block; i++)
      if (table[i] < 0 || table[i] >= blocks) return b;
  }
  return -1;
}

}  // namespace

int allowed(int threads) { return getpid() == STARTED ? threads : 1; }

// The engines that this processor has, a bit for each.
EXPORT int mla_fx_engines() {
  __builtin_cpu_init();
  bool fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (!fma) return 0;
  if (!has_avx512() || !__builtin_cpu_supports("avx512bf16")) return FMA;
  return FMA | AVX512_BF16 | (has_amx() ? AMX : 0);
}

// See Call.  `engine` is one bit of mla_fx_engines, `blocks` how many the cache has, `lengths` the queries and,
// where there are blocks, the keys behind them.  Gives the first request that is unfit, or -1.
static int64_t mla_fx_attend(int engine, int format, const void* q_latent, const void* q_rope, const void* k_latent,
                          const void* k_rope, long latent_block, long latent_row, long rope_block, long rope_row,
                          const int* table, long table_row, long block, long blocks, const long* lengths,
                          long requests, long tokens, long heads, long latent, long rope, float scale, void* out,
                          float* lse, int threads) {
  const long *queries = lengths, *keys = block ? lengths + requests : nullptr;
  Call call = {format, q_latent, q_rope, k_latent, k_rope, latent_block, latent_row, rope_block, rope_row, table,
               table_row, block, queries, keys, requests, tokens, heads, latent, rope, scale, out, lse,
               allowed(threads)};
  if (const int64_t request = unfit(call, blocks); request >= 0) return request;
  const bool pairs = format == BFLOAT16 && latent % 32 == 0 && rope % 32 == 0;
  if (pairs && engine == AMX) attend_amx(call);
  else if (pairs && engine == AVX512_BF16) attend_avx512_bf16(call);
  else has_avx512() ? attend_fma16(call) : attend_fma8(call);
  return -1;
}

EACH(mla_fx_attend)
