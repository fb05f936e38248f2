// The emulated device: streams of tasks, who runs them and in which order, and memory.  See runtime.cpp.
#include "device.h"

#include <dlfcn.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace device {

// Never destroyed: the wheel calls into the runtime while the process ends, in an order nobody promises.
Machine& m = *new Machine;

void note(const Entry& entry) {
  if (m.tracing) m.trace.push_back(entry);
}

double fraction() { return std::uniform_real_distribution<double>(0, 1)(m.draw); }

aclError refuse(aclError status, const std::string& message) {
  m.message = "emulated CANN: " + message;
  return status;
}

namespace {

bool runnable(const Stream* stream) {
  if (stream->queue.empty()) return false;
  const Task& task = stream->queue.front();
  if (task.peers) return task.peers(READY);
  return !task.ready || task.ready();
}

// Whether a stream's head says yes to what is asked of it; false too where no head waits for a peer.
bool any_says(Ask ask) {
  for (Stream* stream : m.streams)
    if (!stream->queue.empty() && stream->queue.front().peers && stream->queue.front().peers(ask)) return true;
  return false;
}

bool peers_awaited() {
  for (Stream* stream : m.streams)
    if (!stream->queue.empty() && stream->queue.front().peers) return true;
  return false;
}

using Clock = std::chrono::steady_clock;

// For how long nothing may happen; HCCL_EXEC_TIMEOUT is CANN's own name for it, whose default is half an hour.
std::chrono::seconds patience() {
  const char* told = getenv("HCCL_EXEC_TIMEOUT");
  int seconds = told ? atoi(told) : 0;
  return std::chrono::seconds(seconds > 0 ? seconds : 120);
}

Stream* choose(const std::vector<Stream*>& ready) {
  if (m.seed % 2 == 0) return ready[m.draw() % ready.size()];
  Stream* first = ready[0];
  for (Stream* stream : ready)
    if (stream->priority > first->priority) first = stream;
  if (m.seed % 4 == 3 && m.draw() % 64 == 0) first->priority = fraction() - 1;  // behind all that were never sent back
  return first;
}

bool fault(const char* message) {
  if (message) m.message = message;
  m.faulted = true;
  return false;
}

// The first operator of a graph behind a wait that nobody ends; empty where that is not why nothing runs.
std::function<void()> held_back() {
  for (Stream* stream : m.streams)
    if (!stream->queue.empty() && stream->queue.front().entry.kind == VALUE_WAIT)
      for (Task& task : stream->queue)
        if (task.blame) return task.blame;
  return nullptr;
}

// Nothing can run: wait for a peer, and say false when that is in vain.  `outside`: `done` depends on peers too.
bool wait_for_peers(Clock::time_point since, int turn, bool outside) {
  std::function<void()> blame;
  {
    Guard guard(m.queues);
    if (!outside && !peers_awaited()) {
      fault("emulated CANN: deadlock, every stream waits for an event");
      blame = held_back();
    } else {
      if (turn % 16 == 15 && any_says(HOPELESS)) return fault(nullptr);
      if (Clock::now() - since > patience()) {
        if (any_says(GIVE_UP)) return fault(nullptr);
        if (outside) return false;
      }
    }
    if (m.faulted && !blame) return false;
  }
  if (blame) {
    blame();
    return false;
  }
  std::this_thread::sleep_for(std::chrono::microseconds(turn < 32 ? 50 : 1000));
  return true;
}

enum Step { DONE, RAN, IDLE, FAULT };

// Run one task, unless `done`.  By the driver only.
Step step(const std::function<bool()>& done) {
  Task task;
  {
    Guard guard(m.queues);
    if (m.faulted) return FAULT;
    if (done()) return DONE;
    std::vector<Stream*> ready;
    for (Stream* stream : m.streams)
      if (runnable(stream)) ready.push_back(stream);
    if (ready.empty()) return IDLE;
    Stream* stream = choose(ready);
    task = std::move(stream->queue.front());
    stream->queue.pop_front();
    if (task.traced) note(task.entry);
  }
  if (task.run && !task.run()) m.faulted = true;
  return RAN;
}

// Become the driver.  Another one may be waiting for Python's lock, which this thread may hold: let go of it meanwhile.
std::unique_lock<std::recursive_mutex> become_driver() {
  std::unique_lock<std::recursive_mutex> alone(m.driver, std::try_to_lock);
  if (alone) return alone;
  auto python = [](const char* name) { return dlsym(RTLD_DEFAULT, name); };
  static auto own_state = reinterpret_cast<void* (*)()>(python("PyGILState_GetThisThreadState"));
  static auto holds = reinterpret_cast<int (*)()>(python("PyGILState_Check"));
  static auto let_go = reinterpret_cast<void* (*)()>(python("PyEval_SaveThread"));
  static auto take = reinterpret_cast<void (*)(void*)>(python("PyEval_RestoreThread"));
  void* state = own_state && own_state() && holds() ? let_go() : nullptr;
  alone.lock();
  if (state) take(state);
  return alone;
}

}  // namespace

bool drive(const std::function<bool()>& done, bool outside) {
  auto alone = become_driver();
  Clock::time_point since;
  for (int turn = 0;;) {
    switch (step(done)) {
      case DONE: return true;
      case FAULT: return false;
      case RAN: turn = 0; break;
      case IDLE:
        if (turn == 0) since = Clock::now();
        if (!wait_for_peers(since, turn++, outside)) return false;
    }
  }
}

void help(const std::function<bool()>& done) {
  std::unique_lock<std::recursive_mutex> alone(m.driver, std::try_to_lock);
  if (!alone) return;
  while (step(done) == RAN) {}
}

Stream* add_stream() {
  static int32_t made_before = 0;
  auto* made = new Stream{made_before++, fraction(), {}};
  m.streams.push_back(made);
  return made;
}

Stream* stream_of(aclrtStream handle) {
  static Stream* null_stream = add_stream();
  return handle ? static_cast<Stream*>(handle) : null_stream;
}

void enqueue(aclrtStream handle, Task task) {
  Guard guard(m.queues);
  task.entry.stream = reinterpret_cast<int64_t>(handle);
  stream_of(handle)->queue.push_back(std::move(task));
}

std::vector<Task> tasks_of(Entry entry, Turn turn, void* issued) {
  std::vector<Task> tasks;
  for (int phase = 0; phase < kPhases; phase++) {
    tasks.push_back({entry, [=] { return turn(issued, phase, RUN) != 0; }, phase == 0});
    tasks.back().peers = [=](int ask) { return turn(issued, phase, ask); };
  }
  return tasks;
}

bool idle(aclrtStream handle) { return stream_of(handle)->queue.empty(); }

bool all_idle() {
  for (Stream* stream : m.streams)
    if (!stream->queue.empty()) return false;
  return true;
}

// --- memory --------------------------------------------------------------------------

// Memory that was given back stays the process's as long as a graph may be replayed that reads or writes it, too late:
// it is handed on to whoever asks next for as much.
void* allocate(std::map<const char*, size_t>& where, size_t bytes) {
  size_t rounded = (bytes + 511) / 512 * 512;
  Guard guard(m.queues);
  auto spare = all_idle() ? m.given_back.find(rounded) : m.given_back.end();
  void* found;
  if (spare != m.given_back.end()) {
    found = spare->second;
    m.given_back.erase(spare);
  } else if (!(found = aligned_alloc(512, rounded))) {
    return nullptr;
  }
  memset(found, 0xff, rounded);  // NaN in every floating dtype, -1 in every signed one
  where[static_cast<char*>(found)] = rounded;
  return found;
}

void release(std::map<const char*, size_t>& where, void* memory) {
  if (!memory) return;
  Guard guard(m.queues);
  auto found = where.find(static_cast<char*>(memory));
  if (found == where.end()) return;
  memset(memory, 0xff, found->second);
  m.given_back.emplace(found->second, memory);  // tasks that are queued may still read it, too late, and shall see NaN
  where.erase(found);
  if (all_idle() && m.graphs == 0) {
    for (auto& [bytes, nobodys] : m.given_back) free(nobodys);
    m.given_back.clear();
  }
}

bool inside(const std::map<const char*, size_t>& where, const void* memory) {
  auto next = where.upper_bound(static_cast<const char*>(memory));
  if (next == where.begin()) return false;
  --next;
  return static_cast<const char*>(memory) < next->first + next->second;
}

}  // namespace device
