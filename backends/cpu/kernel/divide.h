// A call as work for threads, the same bits for any number of them and whatever else is in the call.
//
// A request's rows are cut in items of at most ROWS, and the keys of an item in chunks at places that its own length
// and the number of heads decide.  Each chunk is attended to by itself, and chunks are merged in their order.  Threads
// take runs of chunks of about equal cost; where one begins inside an item, its chunks are kept apart until all are
// there.  Rows do not know of each other, so items may be made smaller to even the runs out.

#pragma once
#include <omp.h>
#include <stdlib.h>

#include "call.h"
#include "attend.h"

namespace {

struct Item {
  long row, first, keys, chunk;  // number of the first row in the call and among its request's
  int request, rows, chunks;
  long all;                      // rows of the request, so that a row's path is the same however they are cut
  long slot;                     // of its first chunk, where they are kept apart; -1: they are not
  double before;                 // cost of all items before it
  double cost() const { return double(rows) * keys; }
  long end(int number) const { return (number + 1) * chunk < keys ? (number + 1) * chunk : keys; }
};

// Memory of a thread, kept between calls.
struct Room {
  char* memory = nullptr;
  size_t size = 0;
  template <class T> T* of(size_t count) {
    size_t wanted = count * sizeof(T) + 4096;
    if (wanted > size) {
      free(memory);
      memory = (char*)aligned_alloc(4096, up_to(wanted + wanted / 4, 4096));
      size = memory ? wanted + wanted / 4 : 0;
      if (!memory) abort();
    }
    return (T*)memory;
  }
};

// Keys of a chunk: few for few heads, where a merge costs little; at most 32 chunks of a request.
INLINE long chunk_of(long keys, long heads) {
  long least = heads < 64 ? 1024 : 4096;
  return least * up_to(keys, 32 * least) / (32 * least);
}

// Items of at most so many rows, and how many there are; `items` may be null.
inline long cut(const Call& call, int rows, Item* items) {
  long count = 0, row = 0;
  double before = 0;
  for (int b = 0; b < call.requests; b++) {
    long all = call.queries[b] * call.heads;
    long parts = (all + rows - 1) / rows, each = parts ? up_to((all + parts - 1) / parts, LANES) : 0;
    for (long first = 0; first < all; first += each) {
      long some = all - first < each ? all - first : each;
      long keys = call.keys ? call.keys[b] : (first + some - 1) / call.heads + 1;
      long chunk = call.keys ? chunk_of(keys, call.heads) : keys;
      Item item = {row + first, first, keys, chunk, b, int(some), int(keys ? (keys + chunk - 1) / chunk : 0), all, -1, before};
      before += item.cost();
      if (items) items[count] = item;
      count++;
    }
    row += all;
  }
  return count;
}

// The thread that a chunk of an item belongs to: where its middle is in the whole cost.
INLINE int owner(const Item& item, int chunk, double whole, int threads) {
  int thread = int((item.before + item.rows * (chunk * item.chunk + item.end(chunk)) * 0.5) / whole * threads);
  return thread < threads ? thread : threads - 1;
}

// The most that a thread has to do, as a multiple of an equal share.
inline double unevenness(const Item* items, long count, double whole, int threads) {
  double most = 0, run = 0;
  int thread = -1;
  for (long i = 0; i < count; i++)
    for (int c = 0; c < items[i].chunks; c++) {
      int to = owner(items[i], c, whole, threads);
      if (to != thread) run = 0, thread = to;
      run += double(items[i].rows) * (items[i].end(c) - c * items[i].chunk);
      if (run > most) most = run;
    }
  return whole ? most * threads / whole : 1;
}

// A call, cut for so many threads.
struct Plan {
  Item* items;
  long count, slots = 0;
  double whole = 0;
  int threads;

  Plan(const Call& call, int threads, Room& room) : threads(threads) {
    for (int rows = ROWS;; rows /= 2) {
      count = cut(call, rows, nullptr);
      items = room.of<Item>(count);
      cut(call, rows, items);
      whole = count ? items[count - 1].before + items[count - 1].cost() : 0;
      if (threads == 1 || rows <= 32 || unevenness(items, count, whole, threads) < 1.1) break;
    }
    for (long i = 0; i < count; i++)
      if (items[i].chunks > 1 && of(items[i], 0) != of(items[i], items[i].chunks - 1)) items[i].slot = slots, slots += items[i].chunks;
  }
  int of(const Item& item, int chunk) const { return owner(item, chunk, whole, threads); }
};

template <class T> float dot(const T* a, const T* b, int n) {
  Floats even = {}, odd = {};
  int f = 0;
  for (; f + 2 * LANES <= n; f += 2 * LANES) {
    even += load(a + f) * load(b + f);
    odd += load(a + f + LANES) * load(b + f + LANES);
  }
  for (; f < n; f += LANES) even += load_some(a + f, least(LANES, n - f)) * load_some(b + f, least(LANES, n - f));
  return sum(even + odd);
}

// What one thread computes with, and its share of a plan.
template <class E> struct Worker {
  using T = typename E::Number;
  const Call& call;
  const Plan& plan;
  Shape shape;
  float* slots;
  typename E::Few few;
  E engine;
  float* s;
  Sums whole, part;
  const Item* packed = nullptr;

  static long before_s(Shape shape) { return up_to(E::Few::floats(shape), 16) + up_to(E::floats(shape), 16); }
  static long before_sums(Shape shape) { return before_s(shape) + long(ROWS) * E::tile; }
  static long floats(Shape shape) { return before_sums(shape) + 2 * Sums::floats(shape); }
  Worker(const Call& call, const Plan& plan, Shape shape, float* slots, float* memory)
      : call(call), plan(plan), shape(shape), slots(slots), few(memory, shape),
        engine(memory + up_to(E::Few::floats(shape), 16), shape), s(memory + before_s(shape)),
        whole(memory + before_sums(shape), shape), part(memory + before_sums(shape) + Sums::floats(shape), shape) {}

  bool is_few(const Item& item) const { return E::Few::takes(shape, item.all); }
  Sums slot(long number) const { return Sums(slots + number * Sums::floats(shape), shape); }

  Keys<T> keys(const Item& item) const {
    Keys<T> keys = {(const T*)call.k_latent, (const T*)call.k_rope, call.latent_block, call.latent_row, call.rope_block, call.rope_row, nullptr, call.block};
    if (call.keys) keys.table = call.table + item.request * call.table_row;
    else {
      long token = (item.row - item.first) / call.heads;  // the request's first
      keys.latent += token * call.latent_row;
      keys.rope += token * call.rope_row;
    }
    return keys;
  }

  void attend_to(const Item& item, int number, Sums sums) {
    const T *latent = (const T*)call.q_latent, *rope = (const T*)call.q_rope;
    Rows<T> rows = {latent + item.row * call.latent, rope + item.row * call.rope, item.rows, item.first};
    if (packed != &item) is_few(item) ? few.pack(rows) : engine.pack(rows);
    packed = &item;
    long from = number * item.chunk, to = item.end(number), heads = call.keys ? 0 : call.heads;
    if (is_few(item)) few.attend(keys(item), from, to, rows, heads, call.scale, sums);
    else attend(engine, keys(item), from, to, rows, heads, call.scale, s, sums, shape);
  }

  // Rows of a token whose only key is its own: no softmax, the latent is passed on bit for bit.
  void pass_on(const Item& item) {
    Keys<T> own = keys(item);
    for (long i = item.row; i < item.row + item.rows; i++) {
      memcpy((T*)call.out + i * call.latent, own.latent, call.latent * sizeof(T));
      call.lse[i] = call.scale * (dot((const T*)call.q_latent + i * call.latent, own.latent, shape.latent) +
                                  dot((const T*)call.q_rope + i * call.rope, own.rope, shape.rope));
    }
  }

  // Results of rows [begin, end) of an item.
  void write(const Item& item, Sums sums, int begin, int end) {
    for (int i = begin; i < end; i++) {
      const float* o = sums.o + long(i) * shape.wide();
      T* out = (T*)call.out + (item.row + i) * call.latent;
      is_few(item) ? few.write(o, 1 / sums.total[i], out) : engine.write(o, 1 / sums.total[i], out);
      call.lse[item.row + i] = (sums.peak[i] + __builtin_log2f(sums.total[i])) * LN2;
    }
  }

  // The chunks that are of thread `mine`.  Those of an item's first thread become one sum; others' are kept.
  void work(int mine) {
    for (long i = 0; i < plan.count; i++) {
      const Item& item = plan.items[i];
      if (!item.chunks || plan.of(item, 0) > mine || plan.of(item, item.chunks - 1) < mine) continue;
      if (!call.keys && call.queries[item.request] == 1) {
        pass_on(item);
        continue;
      }
      bool begins = plan.of(item, 0) == mine;
      Sums first = item.slot < 0 ? whole : slot(item.slot);
      for (int c = 0; c < item.chunks; c++) {
        if (plan.of(item, c) != mine) continue;
        Sums to = !c ? first : begins ? part : slot(item.slot + c);
        attend_to(item, c, to);
        if (c && begins) merge(first, to, 0, item.rows, shape);
      }
      if (item.slot < 0) write(item, first, 0, item.rows);
    }
  }

  // The merges that are left when all threads have worked: of the n-th of `threads` equal parts of each item's rows.
  void finish(int n, int threads) {
    for (long i = 0; i < plan.count; i++) {
      const Item& item = plan.items[i];
      if (item.slot < 0) continue;
      int begin = item.rows * n / threads, end = item.rows * (n + 1) / threads;
      for (int c = 1; c < item.chunks; c++)
        if (plan.of(item, c) != plan.of(item, 0)) merge(slot(item.slot), slot(item.slot + c), begin, end, shape);
      write(item, slot(item.slot), begin, end);
    }
  }
};

// Rows [begin, end) have no key.
template <class T> INLINE void nothing(const Call& call, long begin, long end) {
  memset((void*)((T*)call.out + begin * call.latent), 0, (end - begin) * call.latent * sizeof(T));
  for (long i = begin; i < end; i++) call.lse[i] = -INF;
}

template <class E> void run(const Call& call) {
  static thread_local Room items, kept, mine;
  Shape shape = {int(call.latent), int(call.rope)};
  Plan plan(call, call.threads, items);
  float* slots = kept.of<float>(plan.slots * Sums::floats(shape));
  long row = 0;
  for (long i = 0; i < plan.count; i++) {
    const Item& item = plan.items[i];
    if (!item.chunks) nothing<typename E::Number>(call, item.row, item.row + item.rows);
    row = item.row + item.rows;
  }
  nothing<typename E::Number>(call, row, call.tokens * call.heads);
  if (plan.threads == 1) {
    Worker<E>(call, plan, shape, slots, mine.of<float>(Worker<E>::floats(shape))).work(0);
    return;
  }
#pragma omp parallel num_threads(plan.threads)
  {
    int thread = omp_get_thread_num(), threads = omp_get_num_threads();  // may be fewer than asked for
    Worker<E> worker(call, plan, shape, slots, mine.of<float>(Worker<E>::floats(shape)));
    for (int share = thread; share < plan.threads; share += threads) worker.work(share);
    if (plan.slots) {
#pragma omp barrier
      worker.finish(thread, threads);
    }
  }
}

template <template <class> class E> void attend_all(const Call& call) {
  call.format == FLOAT32 ? run<E<float>>(call) : call.format == BFLOAT16 ? run<E<Bf16>>(call) : run<E<Fp16>>(call);
}

}  // namespace
