// The emulated device, for the files of libascendcl.so: what a task, a stream and an event are, and who runs them.
#pragma once

#include "acl/acl.h"

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace device {

// As `machine.py` names them.
enum Kind : int64_t {
  OPERATOR, RECORD, WAIT, TO_DEVICE, TO_HOST, ON_DEVICE, FILL, COLLECTIVE, PREFETCH,
  VALUE_WAIT, VALUE_WRITE, REPLAY, UPDATE
};

struct Entry {
  int64_t kind, stream, subject, bytes;  // subject: an operator's executor, an event, a collective's op and dtype
  int64_t graph = 0;                     // the number of the graph that a replay runs it for; 0: none
};

using Mark = std::shared_ptr<bool>;  // set when the device has come past a record

// An operator, in Python.  `executor` is its number there; `phase` says what is asked, see `machine.py`.
using Run = int (*)(int64_t executor, int phase, void* workspace, uint64_t bytes);
enum Phase { BEGIN, END, REPLAY_BEGIN, REPLAY_END, KEEP, COMPARE, CHANGE, FORGET, BLAME, PROTECT, SPOIL, GONE };

struct Launch {
  Run run;
  int64_t executor;
  void* workspace;
  uint64_t bytes;
  int operator()(Phase phase) const { return run(executor, phase, workspace, bytes); }
};

// A collective, in hccl.cpp.  `Issue` gives it its turn in its group, or (`again`) one more that is the same; `Turn` is
// asked about one of its phases, or told to run it (RUN; 0 is a fault).
enum Ask { READY, HOPELESS, GIVE_UP, RUN };  // HOPELESS: it will never run; GIVE_UP: it waited too long; both say why
using Issue = void* (*)(void* collective, int again);
using Turn = int (*)(void* collective, int phase, int ask);
constexpr int kPhases = 3;

struct Range {
  const char* begin = nullptr;
  uint64_t bytes = 0;
};

struct Task {
  Entry entry;
  std::function<bool()> run;  // false: a fault on the device
  bool traced = true;
  std::function<bool()> ready = nullptr;    // empty: always
  std::function<int(int)> peers = nullptr;  // asked by a number of `Ask`: for tasks that other processes hold back
  Range reads = {};                         // what it reads, where it is no operator
  std::function<void()> blame = nullptr;    // of an operator of a graph: say that it waits for ever
};

struct Lane;   // of a graph, see capture.h
struct Group;

struct Event {
  Mark last;             // of its last record; a wait is for the one that was the last when the wait was enqueued
  Lane* lane = nullptr;  // where its last record was captured, until that capture ends; `record`: which of the graph's
  size_t record = 0;
};

struct Stream {
  int32_t id;
  double priority;
  std::deque<Task> queue;
  Lane* lane = nullptr;      // while it is being captured
  Group* changed = nullptr;  // whose operators it is changing
};

constexpr aclError kFault = 507011, kOutOfMemory = 207001, kNoSuchDevice = 107001;

struct Machine {
  std::recursive_mutex queues;  // streams and their queues; short, and nothing of Python under it
  std::recursive_mutex driver;  // held by the one thread that runs tasks
  std::vector<Stream*> streams;
  std::mt19937_64 draw{0};
  uint64_t seed = 0;
  std::vector<Entry> trace;
  bool tracing = false;
  std::map<const char*, size_t> pinned, device;
  std::multimap<size_t, void*> given_back;
  std::string message = "emulated CANN";
  bool faulted = false;
  uint64_t thrown_away = 0;  // how often a recovery cleared the queues
  int64_t graphs = 0;        // how many there are
  bool leaving = false;      // Python is; it cannot be asked any more
};
extern Machine& m;

using Guard = std::lock_guard<std::recursive_mutex>;

void note(const Entry& entry);
double fraction();
aclError refuse(aclError status, const std::string& message);

// Run tasks until `done`.  False: a fault, or a deadlock (every stream waits), or peers that do not come.
bool drive(const std::function<bool()>& done, bool outside = false);
// Run what can run, until `done`, unless somebody drives.
void help(const std::function<bool()>& done);

Stream* add_stream();
Stream* stream_of(aclrtStream handle);
void enqueue(aclrtStream handle, Task task);
// The tasks of a collective that has its turn.
std::vector<Task> tasks_of(Entry entry, Turn turn, void* issued);
bool idle(aclrtStream handle);
bool all_idle();

// Memory of the host or the device: NaN when it is given out, NaN again when it is given back.
void* allocate(std::map<const char*, size_t>& where, size_t bytes);
void release(std::map<const char*, size_t>& where, void* memory);
bool inside(const std::map<const char*, size_t>& where, const void* memory);

}  // namespace device
