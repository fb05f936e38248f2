// How Python calls a function: for several ranks in one call, where a call for each costs more than its part of the work.
//
// Numbers are common to all of them: a word of 8 bytes for every argument that is one, a float in the first four.  For
// each argument that is a rank's own, an address or an integer that is `Own`, there is the first rank's, and what is to be
// added to it from a rank to the next; where that is negative, the first is the address of a list, with a word for every
// rank.  Without steps there is one rank.
//
// A function that gives a number refuses what it was given where that is not negative, and says which by it; so do all
// ranks together, by number * ranks + rank of the first that does.

#pragma once
#include <stdint.h>
#include <string.h>

#include <type_traits>
#include <utility>

namespace {

struct Own {
  int64_t value;
  operator int64_t() const { return value; }
};

template <class T>
constexpr bool OF_A_RANK = std::is_pointer_v<T> || std::is_same_v<T, Own>;

// How many of the arguments before one are a rank's own, or are not.
template <class... T>
constexpr int64_t before(size_t argument, bool own) {
  constexpr bool owned[] = {OF_A_RANK<T>...};
  int64_t count = 0;
  for (size_t i = 0; i < argument; i++) count += owned[i] == own;
  return count;
}

template <class T>
T read(const int64_t& word) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(word);
  } else if constexpr (std::is_floating_point_v<T>) {
    T value;
    memcpy(&value, &word, sizeof value);
    return value;
  } else if constexpr (std::is_same_v<T, Own>) {
    return {word};
  } else {
    return static_cast<T>(word);
  }
}

template <class R, class... T, size_t... I>
int64_t for_each_rank(R (*function)(T...), int64_t ranks, const int64_t* numbers, const int64_t* firsts,
                      const int64_t* steps, std::index_sequence<I...>) {
  for (int64_t rank = 0; rank < ranks; rank++) {
    const auto own = [=](int64_t i) {
      if (!steps) return firsts[i];
      return steps[i] < 0 ? reinterpret_cast<const int64_t*>(firsts[i])[rank] : firsts[i] + rank * steps[i];
    };
    const auto call = [&] {
      return function(read<T>(OF_A_RANK<T> ? own(before<T...>(I, true)) : numbers[before<T...>(I, false)])...);
    };
    if constexpr (std::is_void_v<R>) call();
    else if (const int64_t refused = call(); refused >= 0) return refused * ranks + rank;
  }
  return -1;
}

template <class R, class... T>
int64_t for_each_rank(R (*function)(T...), int64_t ranks, const int64_t* numbers, const int64_t* firsts,
                      const int64_t* steps) {
  return for_each_rank(function, ranks, numbers, firsts, steps, std::index_sequence_for<T...>());
}

}  // namespace

#define EACH(function) EACH_OF(function)
#define EACH_OF(function)                                                                         \
  extern "C" __attribute__((visibility("default"))) int64_t function##_each(                     \
      int64_t ranks, const int64_t* numbers, const int64_t* firsts, const int64_t* steps) {      \
    return for_each_rank(function, ranks, numbers, firsts, steps);                                \
  }
