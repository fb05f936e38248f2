// What Python calls.  Compiled for any x86-64: nothing here may use what a processor need not have.

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "allowed.h"
#include "call.h"

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
EXPORT void mla_fx_attend(int engine, const Call* asked) {
  Call call = *asked;
  call.threads = allowed(call.threads);
  const bool pairs = call.format == BFLOAT16 && call.latent % 32 == 0 && call.rope % 32 == 0;
  if (pairs && engine == AMX) return attend_amx(call);
  if (pairs && engine == AVX512_BF16) return attend_avx512_bf16(call);
  has_avx512() ? attend_fma16(call) : attend_fma8(call);
}
