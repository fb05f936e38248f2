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

// See Call.  `engine` is one bit of mla_fx_engines.
static void mla_fx_attend(int engine, int format, const void* q_latent, const void* q_rope, const void* k_latent,
                          const void* k_rope, long latent_block, long latent_row, long rope_block, long rope_row,
                          const int* table, long table_row, long block, const long* queries, const long* keys,
                          long requests, long tokens, long heads, long latent, long rope, float scale, void* out,
                          float* lse, int threads) {
  Call call = {format, q_latent, q_rope, k_latent, k_rope, latent_block, latent_row, rope_block, rope_row, table,
               table_row, block, queries, keys, requests, tokens, heads, latent, rope, scale, out, lse,
               allowed(threads)};
  const bool pairs = format == BFLOAT16 && latent % 32 == 0 && rope % 32 == 0;
  if (pairs && engine == AMX) return attend_amx(call);
  if (pairs && engine == AVX512_BF16) return attend_avx512_bf16(call);
  has_avx512() ? attend_fma16(call) : attend_fma8(call);
}

EACH(mla_fx_attend)
