// An emulated CANN runtime (libascendcl.so) for the unmodified torch_npu wheel, on a machine without an NPU.
//
// Device memory is host memory: NaN when it is given out, NaN again when it is given back.  A stream is a queue of
// tasks, and nothing runs when it is enqueued.  Tasks run only while the host waits, one at a time; the next one is
// drawn by a seed among the heads of all streams that no event holds back.  So a program sees only the order that
// its streams and events guarantee, as late as a device may be, and a seed replays what happened.
//
// Even seeds draw uniformly.  The others give streams priorities, so that one is kept back for as long as events allow;
// every other one of them changes a priority now and then.  A trace, where one is asked for, has every task that ran: operators, copies, records, waits.
//
// Collectives (hccl.cpp) are tasks that wait for other processes.  While they do, the other streams move on, and where
// none can, the host polls, asks whether a peer is gone, and gives up in the end.  How fast peers are is not drawn:
// with several processes a seed leads the interleaving, but does not replay it.
#include "acl/acl.h"
#include "acl/acl_op_compiler.h"

#include <dlfcn.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

enum Kind : int64_t { OPERATOR, RECORD, WAIT, TO_DEVICE, TO_HOST, ON_DEVICE, FILL, COLLECTIVE, PREFETCH };

struct Entry {
  int64_t kind, stream, subject, bytes;  // subject: an operator's executor, an event, a collective's op and dtype
};

using Mark = std::shared_ptr<bool>;  // set when the device has come past a record

struct Event {
  Mark last;  // of its last record; a wait is for the one that was the last when the wait was enqueued
};

struct Task {
  Entry entry;
  std::function<bool()> run;  // false: a fault on the device
  bool traced = true;
  Mark wait;  // empty: for nothing
  std::function<int(int)> peers = nullptr;  // asked by a number of `Ask`: for tasks that other processes hold back
};

// READY: whether it can run.  HOPELESS: whether it never will.  GIVE_UP: it has waited too long.  The last two say why.
enum Ask { READY, HOPELESS, GIVE_UP };

struct Stream {
  int32_t id;
  double priority;
  std::deque<Task> queue;
};

constexpr aclError kFault = 507011, kOutOfMemory = 207001, kNoSuchDevice = 107001;

// Never destroyed: the wheel calls into the runtime while the process ends, in an order nobody promises.
struct Machine {
  std::recursive_mutex queues;  // streams and their queues; short
  std::recursive_mutex driver;  // held by the one thread that runs tasks
  std::vector<Stream*> streams;
  std::mt19937_64 draw{0};
  uint64_t seed = 0;
  std::vector<Entry> trace;
  bool tracing = false;
  std::map<const char*, size_t> pinned, device;
  std::vector<void*> given_back;
  std::string message = "emulated CANN";
  bool faulted = false;
  uint64_t thrown_away = 0;  // how often a recovery cleared the queues
};
Machine& m = *new Machine;

// As many as a server of A2 has.  They are apart by number, in what a process says and is told; their memory is the
// host's, and streams are whose they are.
constexpr int32_t kDevices = 8;
int contexts[kDevices];
thread_local int32_t current = 0;

void note(const Entry& entry) {
  if (m.tracing) m.trace.push_back(entry);
}

double fraction() { return std::uniform_real_distribution<double>(0, 1)(m.draw); }

bool runnable(const Stream* stream) {
  if (stream->queue.empty()) return false;
  const Task& task = stream->queue.front();
  if (task.peers) return task.peers(READY);
  return !task.wait || *task.wait;
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

// Nothing can run: wait for a peer, and say false when that is in vain.  `outside`: `done` depends on peers too.
bool wait_for_peers(Clock::time_point since, int turn, bool outside) {
  {
    std::lock_guard<std::recursive_mutex> guard(m.queues);
    if (!outside && !peers_awaited()) return fault("emulated CANN: deadlock, every stream waits for an event");
    if (turn % 16 == 15 && any_says(HOPELESS)) return fault(nullptr);
    if (Clock::now() - since > patience()) {
      if (any_says(GIVE_UP)) return fault(nullptr);
      if (outside) return false;
    }
  }
  std::this_thread::sleep_for(std::chrono::microseconds(turn < 32 ? 50 : 1000));
  return true;
}

enum Step { DONE, RAN, IDLE, FAULT };

// Run one task, unless `done`.  By the driver only.
Step step(const std::function<bool()>& done) {
  Task task;
  {
    std::lock_guard<std::recursive_mutex> guard(m.queues);
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

// Run tasks until `done`.  False: a fault, or a deadlock (every stream waits), or peers that do not come.
bool drive(const std::function<bool()>& done, bool outside = false) {
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

Stream* stream_of(aclrtStream handle) {
  static Stream* null_stream = [] {
    auto* made = new Stream{0, fraction(), {}};
    m.streams.push_back(made);
    return made;
  }();
  return handle ? static_cast<Stream*>(handle) : null_stream;
}

void enqueue(aclrtStream handle, Task task) {
  std::lock_guard<std::recursive_mutex> guard(m.queues);
  task.entry.stream = reinterpret_cast<int64_t>(handle);
  stream_of(handle)->queue.push_back(std::move(task));
}

bool idle(aclrtStream handle) { return stream_of(handle)->queue.empty(); }

bool all_idle() {
  for (Stream* stream : m.streams)
    if (!stream->queue.empty()) return false;
  return true;
}

void* allocate(std::map<const char*, size_t>& where, size_t bytes) {
  size_t rounded = (bytes + 511) / 512 * 512;
  auto* found = static_cast<char*>(aligned_alloc(512, rounded));
  if (!found) return nullptr;
  memset(found, 0xff, rounded);  // NaN in every floating dtype, -1 in every signed one
  std::lock_guard<std::recursive_mutex> guard(m.queues);
  where[found] = rounded;
  return found;
}

void release(std::map<const char*, size_t>& where, void* memory) {
  if (!memory) return;
  std::lock_guard<std::recursive_mutex> guard(m.queues);
  auto found = where.find(static_cast<char*>(memory));
  if (found == where.end()) return;
  memset(memory, 0xff, found->second);
  where.erase(found);
  m.given_back.push_back(memory);  // tasks that are queued may still read it, too late, and shall see NaN
  if (all_idle()) {
    for (void* nobodys : m.given_back) free(nobodys);
    m.given_back.clear();
  }
}

bool inside(const std::map<const char*, size_t>& where, const void* memory) {
  auto next = where.upper_bound(static_cast<const char*>(memory));
  if (next == where.begin()) return false;
  --next;
  return static_cast<const char*>(memory) < next->first + next->second;
}

Kind kind_of(aclrtMemcpyKind kind) {
  if (kind == ACL_MEMCPY_HOST_TO_DEVICE) return TO_DEVICE;
  return kind == ACL_MEMCPY_DEVICE_TO_HOST ? TO_HOST : ON_DEVICE;
}

}  // namespace

extern "C" {

// --- for the operator library and for Python ---------------------------------

using Run = int (*)(int64_t executor, int phase, void* workspace, uint64_t bytes);

// Defer an operator to a stream: it begins (phase 0) and ends (phase 1), and other streams may move in between.
void emulator_enqueue(aclrtStream stream, Run run, int64_t executor, void* workspace, uint64_t bytes) {
  Entry entry{OPERATOR, 0, executor, 0};
  for (int phase = 0; phase < 2; phase++)
    enqueue(stream, {entry, [=] { return run(executor, phase, workspace, bytes) == 0; }, phase == 0});
}

// Defer a collective: `phases` tasks, each of which waits until `turn(collective, phase, READY)`.
using Turn = int (*)(void* collective, int phase, int ask);
constexpr int kRun = 3;  // asked of a turn beside `Ask`: to run; 0 is a fault

void emulator_enqueue_collective(aclrtStream stream, Turn turn, void* collective, int phases, int64_t subject,
                                 int64_t bytes) {
  Entry entry{COLLECTIVE, 0, subject, bytes};
  std::lock_guard<std::recursive_mutex> guard(m.queues);
  for (int phase = 0; phase < phases; phase++) {
    Task task{entry, [=] { return turn(collective, phase, kRun) != 0; }, phase == 0};
    task.peers = [=](int ask) { return turn(collective, phase, ask); };
    enqueue(stream, std::move(task));
  }
}

// Wait on the host for what other processes do; meanwhile the device runs.  1: `done`; 0: a fault, or it took too long.
int emulator_wait(int (*done)(void*), void* subject) {
  return drive([=] { return done(subject) != 0; }, true);
}

// For a host that waits for something else than its device: run what can run, until `done`, unless somebody drives.
void emulator_help(int (*done)()) {
  std::unique_lock<std::recursive_mutex> alone(m.driver, std::try_to_lock);
  if (!alone) return;
  while (step([=] { return done() != 0; }) == RAN) {}
}

uint64_t emulator_thrown_away() { return m.thrown_away; }

void emulator_seed(uint64_t seed) {
  std::lock_guard<std::recursive_mutex> guard(m.queues);
  m.seed = seed;
  m.draw.seed(seed);
  for (Stream* stream : m.streams) stream->priority = fraction();
}

void emulator_message(const char* message) { m.message = message; }
int64_t emulator_trace_length() { return static_cast<int64_t>(m.trace.size()); }
const void* emulator_trace_entries() { return m.trace.data(); }

void emulator_trace(int on) {
  m.tracing = on;
  m.trace.clear();
}

// After a fault nothing runs any more, as on a device; this throws away what waits and starts afresh.
int emulator_recover() {
  std::lock_guard<std::recursive_mutex> guard(m.queues);
  if (!m.faulted) return 0;
  for (Stream* stream : m.streams) {
    for (Task& task : stream->queue)
      if (task.entry.kind == RECORD) task.run();  // so that nobody waits for ever for what was thrown away
    stream->queue.clear();
  }
  m.faulted = false;
  m.thrown_away++;
  return 1;
}

// The wheel's older way to an operator, by its type, which it takes where an operator has no aclnn name.
static aclError absent(const char* type) {
  m.message = std::string("emulated CANN: operator ") + type + " is not in the emulator's table";
  return 500001;
}

aclError aclopCompileAndExecute(const char* type, int, const aclTensorDesc* const[], const aclDataBuffer* const[], int,
                                const aclTensorDesc* const[], aclDataBuffer* const[], const aclopAttr*,
                                aclopEngineType, aclopCompileType, const char*, aclrtStream) {
  return absent(type);
}

aclError aclopCompileAndExecuteV2(const char* type, int, aclTensorDesc*[], aclDataBuffer*[], int, aclTensorDesc*[],
                                  aclDataBuffer*[], aclopAttr*, aclopEngineType, aclopCompileType, const char*,
                                  aclrtStream) {
  return absent(type);
}

// --- what is asked about the platform ------------------------------------------

const char* aclrtGetSocName() { return "Ascend910B1"; }  // an A2 that the wheel knows
const char* aclGetRecentErrMsg() { return m.message.c_str(); }
aclError aclInit(const char*) { return 0; }
aclError aclFinalize() { return 0; }
int aclDestroyAclOpExecutor(void*) { return 0; }

static char played[3][4] = {"9", "1", "0"};  // major, minor and release

// The release that is played.  The wheel keeps some of what it decides by it.
void emulator_cann(const char* major, const char* minor, const char* release) {
  strncpy(played[0], major, 3);
  strncpy(played[1], minor, 3);
  strncpy(played[2], release, 3);
}

aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* version) {
  memset(version, 0, sizeof *version);
  snprintf(version->version, sizeof version->version, "%s.%s.%s", played[0], played[1], played[2]);
  strcpy(version->majorVersion, played[0]);
  strcpy(version->minorVersion, played[1]);
  strcpy(version->releaseVersion, played[2]);
  return 0;
}

size_t aclGetCompileoptSize(aclCompileOpt) { return 16; }

aclError aclGetCompileopt(aclCompileOpt, char* value, size_t size) {
  strncpy(value, "disable", size);  // no just-in-time graphs: operators are called by their aclnn names
  return 0;
}

aclError aclrtGetDeviceCount(uint32_t* count) { *count = kDevices; return 0; }

aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= kDevices) {
    m.message = "emulated CANN: devices are 0 to " + std::to_string(kDevices - 1) + ": got " + std::to_string(device);
    return kNoSuchDevice;
  }
  current = device;
  return 0;
}

aclError aclrtResetDevice(int32_t) { return 0; }
aclError aclrtGetDevice(int32_t* device) { *device = current; return 0; }
aclError aclrtGetCurrentContext(aclrtContext* context) { *context = &contexts[current]; return 0; }

aclError aclrtSetCurrentContext(aclrtContext context) {
  return aclrtSetDevice(static_cast<int32_t>(static_cast<int*>(context) - contexts));
}

aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr, int64_t* value) { *value = 24; return 0; }

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free_bytes, size_t* total) {
  *free_bytes = 32ull << 30;
  *total = 64ull << 30;
  return 0;
}

// --- memory ----------------------------------------------------------------------

aclError aclrtMalloc(void** memory, size_t bytes, aclrtMemMallocPolicy) {
  *memory = allocate(m.device, bytes);
  return *memory ? 0 : kOutOfMemory;
}

aclError aclrtMallocAlign32(void** memory, size_t bytes, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(memory, bytes, policy);
}

aclError aclrtFree(void* memory) { release(m.device, memory); return 0; }

aclError aclrtMallocHost(void** memory, size_t bytes) {
  *memory = allocate(m.pinned, bytes);
  return *memory ? 0 : kOutOfMemory;
}

aclError aclrtFreeHost(void* memory) { release(m.pinned, memory); return 0; }

aclError aclrtMemcpy(void* to, size_t, const void* from, size_t bytes, aclrtMemcpyKind kind) {
  memcpy(to, from, bytes);
  std::lock_guard<std::recursive_mutex> guard(m.queues);
  note({kind_of(kind), 0, 0, static_cast<int64_t>(bytes)});
  return 0;
}

aclError aclrtMemcpyAsync(void* to, size_t, const void* from, size_t bytes, aclrtMemcpyKind kind, aclrtStream stream) {
  Entry entry{kind_of(kind), 0, 0, static_cast<int64_t>(bytes)};
  bool pageable;
  {
    std::lock_guard<std::recursive_mutex> guard(m.queues);
    pageable = kind == ACL_MEMCPY_HOST_TO_DEVICE && !inside(m.pinned, from);
  }
  if (pageable) {  // read before the call returns, as from memory that may be paged out
    std::string held(static_cast<const char*>(from), bytes);
    enqueue(stream, {entry, [=] { memcpy(to, held.data(), bytes); return true; }});
  } else {
    enqueue(stream, {entry, [=] { memcpy(to, from, bytes); return true; }});
  }
  return 0;
}

aclError aclrtMemset(void* to, size_t, int32_t value, size_t bytes) { memset(to, value, bytes); return 0; }

aclError aclrtMemsetAsync(void* to, size_t, int32_t value, size_t bytes, aclrtStream stream) {
  enqueue(stream, {{FILL, 0, 0, static_cast<int64_t>(bytes)}, [=] { memset(to, value, bytes); return true; }});
  return 0;
}

// A hint to the cache: it takes its turn on the stream and moves nothing.
aclError aclrtCmoAsync(void*, size_t bytes, aclrtCmoType, aclrtStream stream) {
  enqueue(stream, {{PREFETCH, 0, 0, static_cast<int64_t>(bytes)}, [] { return true; }});
  return 0;
}

// --- streams ---------------------------------------------------------------------

aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  std::lock_guard<std::recursive_mutex> guard(m.queues);
  stream_of(nullptr);
  auto* made = new Stream{static_cast<int32_t>(m.streams.size()), fraction(), {}};
  m.streams.push_back(made);
  *stream = made;
  return 0;
}

aclError aclrtCreateStream(aclrtStream* stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }
aclError aclrtDestroyStream(aclrtStream) { return 0; }
aclError aclrtDestroyStreamForce(aclrtStream) { return 0; }
aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) { *id = stream_of(stream)->id; return 0; }

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
  std::lock_guard<std::recursive_mutex> guard(m.queues);
  *status = idle(stream) ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return 0;
}

aclError aclrtSynchronizeStream(aclrtStream stream) { return drive([=] { return idle(stream); }) ? 0 : kFault; }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) { return aclrtSynchronizeStream(stream); }
aclError aclrtSynchronizeDevice() { return drive(all_idle) ? 0 : kFault; }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }

// --- events ----------------------------------------------------------------------

aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) { *event = new Event; return 0; }
aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t) { *event = new Event; return 0; }
aclError aclrtCreateEvent(aclrtEvent* event) { *event = new Event; return 0; }
aclError aclrtDestroyEvent(aclrtEvent) { return 0; }  // kept: tasks that wait for it may still be queued

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream) {
  auto* event = static_cast<Event*>(handle);
  std::lock_guard<std::recursive_mutex> guard(m.queues);
  Mark mark = event->last = std::make_shared<bool>(false);
  auto passed = [=] { return *mark = true; };
  enqueue(stream, {{RECORD, 0, reinterpret_cast<int64_t>(handle), 0}, passed});
  return 0;
}

aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return 0; }

aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus* status) {
  std::lock_guard<std::recursive_mutex> guard(m.queues);
  auto* event = static_cast<Event*>(handle);
  bool passed = !event->last || *event->last;
  *status = passed ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return 0;
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent handle) {
  std::lock_guard<std::recursive_mutex> guard(m.queues);
  auto* event = static_cast<Event*>(handle);
  enqueue(stream, {{WAIT, 0, reinterpret_cast<int64_t>(handle), 0}, nullptr, true, event->last});
  return 0;
}

aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  Mark mark = static_cast<Event*>(handle)->last;
  return !mark || drive([=] { return *mark; }) ? 0 : kFault;
}

aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent, aclrtEvent) { *milliseconds = 0; return 0; }

}  // extern "C"
