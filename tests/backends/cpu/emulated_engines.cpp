// The engines of registers of 512 bits over the emulated processor, behind the entry that Python calls.
#include "amx.cpp"
#include "avx512_bf16.cpp"
#include "entry.cpp"
#include "fma16.cpp"

void attend_fma8(const Call& call) { attend_fma16(call); }  // entry.cpp takes it where the real processor has no AVX-512

// What has been executed since the last call, and from now on how often each 64 bytes of a memory are loaded.
EXPORT void emulated_counts(emulated::Counts* counts) { *counts = emulated::counts, emulated::counts = {}; }
EXPORT void emulated_watch(const void* memory, long bytes, int32_t* times) {
  emulated::watched = {uintptr_t(memory), uintptr_t(memory) + bytes, times};
}

// Whether this thread still has tiles.
EXPORT int emulated_tiles() { return emulated::tiles.shape.palette; }
