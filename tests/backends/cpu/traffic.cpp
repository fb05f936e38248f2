// What a kernel asks of memory: misses of one cache that everything goes through which it loads and stores.
//
// The engines are compiled with -fsanitize=thread, by which the compiler puts a call at each load and store.  Those calls
// are defined here, instead of by the sanitizer's library: they play the addresses through a cache of lines of 64 bytes,
// 16 in a set, of which the one that was not used for longest goes.  A prefetch is no such load; the line of a key that
// is prefetched is counted when the key is loaded.
#include <stdlib.h>

#include "entry.cpp"

void attend_fma16(const Call& call) { attend_fma8(call); }  // the same text; what the processor has makes no difference

namespace {

constexpr long LINE = 64, WAYS = 16;

struct Cache {
  uint64_t* lines = nullptr;  // [sets][WAYS], the one that was used last first; null: nothing is counted
  uint64_t sets = 0, last = 0;
  long misses = 0;

  void use(uint64_t line) {
    if (line == last) return;
    last = line;
    uint64_t* own = lines + line % sets * WAYS;
    int way = 0;
    while (way < WAYS && own[way] != line) way++;
    if (way == WAYS) misses++, way--;
    for (; way; way--) own[way] = own[way - 1];
    own[0] = line;
  }
  void use(const void* at, long size) {
    if (lines && size)
      for (uint64_t line = uint64_t(at) / LINE; line <= (uint64_t(at) + size - 1) / LINE; line++) use(line);
  }
} cache;

}  // namespace

#define USED(size)                                                          \
  extern "C" void __tsan_read##size(void* at) { cache.use(at, size); }            \
  extern "C" void __tsan_write##size(void* at) { cache.use(at, size); }           \
  extern "C" void __tsan_unaligned_read##size(void* at) { cache.use(at, size); }  \
  extern "C" void __tsan_unaligned_write##size(void* at) { cache.use(at, size); }
USED(1)
USED(2)
USED(4)
USED(8)
USED(16)
extern "C" void __tsan_read_range(void* at, long size) { cache.use(at, size); }
extern "C" void __tsan_write_range(void* at, long size) { cache.use(at, size); }
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}

extern "C" void* __real_memcpy(void* to, const void* from, size_t size);  // copies that stay calls, by --wrap=memcpy
extern "C" void* __wrap_memcpy(void* to, const void* from, size_t size) {
  cache.use(from, size), cache.use(to, size);
  return __real_memcpy(to, from, size);
}

// An empty cache of so many bytes, a multiple of 1024, is there from now on; of 0, none.  Returns the bytes that the one
// before has had from memory.
EXPORT long traffic(long size) {
  const long before = cache.misses * LINE;
  free(cache.lines);
  cache = Cache();
  cache.sets = size / (LINE * WAYS);
  if (size) cache.lines = (uint64_t*)calloc(cache.sets * WAYS, sizeof(uint64_t));
  return before;
}
