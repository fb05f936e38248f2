// How many threads work, of those that are asked for.
#pragma once

#include <stdint.h>

// In a child that was forked one, since OpenMP waits there for threads that it has not.
int allowed(int threads);

namespace {

constexpr int64_t ALONE = 1 << 16;  // numbers, or products, below which threads are not worth waking

inline int crew(int64_t numbers, int64_t threads) { return numbers < ALONE ? 1 : allowed(static_cast<int>(threads)); }

}  // namespace
