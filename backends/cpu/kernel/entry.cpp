// What Python calls.  Compiled for any x86-64: nothing here may use what a processor need not have.

#define EXPORT extern "C" __attribute__((visibility("default")))

// The engines that this processor has, a bit for each.
EXPORT int mla_fx_engines() {
  __builtin_cpu_init();
  bool fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  return fma ? 1 : 0;
}
