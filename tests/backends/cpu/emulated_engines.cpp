// Both engines for bf16 over the emulated processor, behind the entry that Python calls. The others are not there: what
// entry.cpp gives to them is answered by LSEs of 7.
#include "amx.cpp"
#include "avx512_bf16.cpp"
#include "entry.cpp"

static void other(const Call& call) {
  for (long i = 0; i < call.tokens * call.heads; i++) call.lse[i] = 7;
}
void attend_fma8(const Call& call) { other(call); }
void attend_fma16(const Call& call) { other(call); }

// What has been executed since the last call, and from now on how often each 64 bytes of a memory are loaded.
EXPORT void emulated_counts(emulated::Counts* counts) { *counts = emulated::counts, emulated::counts = {}; }
EXPORT void emulated_watch(const void* memory, long bytes, int32_t* times) {
  emulated::watched = {uintptr_t(memory), uintptr_t(memory) + bytes, times};
}

// Whether this thread still has tiles.
EXPORT int emulated_tiles() { return emulated::tiles.shape.palette; }
