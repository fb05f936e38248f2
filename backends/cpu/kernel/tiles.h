// The tile instructions, with the number of a tile as a template's argument: the compiler's own macros take no such.
#pragma once

namespace {

#ifdef MLA_EMULATED

template <int T>
inline void tile_load(const void* from, long stride) {
  emulated::tileload(T, from, stride);
}
template <int T>
inline void tile_store(void* to, long stride) {
  emulated::tilestore(T, to, stride);
}
template <int T>
inline void tile_zero() {
  emulated::tilezero(T);
}
template <int C, int A, int B>
inline void tile_dot() {
  emulated::tiledot(C, A, B);
}
inline void tile_configure(const void* shape) { emulated::ldtilecfg(shape); }
inline void tile_release() { emulated::tilerelease(); }

#else

// Rows of tile T from `from` on, `stride` bytes apart.
template <int T>
inline __attribute__((always_inline)) void tile_load(const void* from, long stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline __attribute__((always_inline)) void tile_store(void* to, long stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline __attribute__((always_inline)) void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
// C += A B, A of bf16 in rows, B of pairs of rows.
template <int C, int A, int B>
inline __attribute__((always_inline)) void tile_dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
inline void tile_configure(const void* shape) {
  asm volatile("ldtilecfg %0" ::"m"(*static_cast<const char(*)[64]>(shape)));
}
inline void tile_release() { asm volatile("tilerelease"); }

#endif

}  // namespace
