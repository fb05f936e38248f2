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

// Whether this thread still has tiles.
EXPORT int emulated_tiles() { return emulated::tiles.shape.palette; }
