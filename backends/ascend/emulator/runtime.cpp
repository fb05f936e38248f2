// An emulated CANN runtime (libascendcl.so) for the unmodified torch_npu wheel, on a machine without an NPU.
//
// Device memory is host memory: NaN when it is given out, NaN again when it is given back.  A stream is a queue of
// tasks, and nothing runs when it is enqueued.  Tasks run only while the host waits, one at a time; the next one is
// drawn by a seed among the heads of all streams that no event holds back.  So a program sees only the order that
// its streams and events guarantee, as late as a device may be, and a seed replays what happened.
//
// Even seeds draw uniformly.  The others give streams priorities, so that one is kept back for as long as events allow;
// every other one of them changes a priority now and then.  A trace, where one is asked for, has every task that ran:
// operators, copies, records, waits.
//
// Collectives (hccl.cpp) are tasks that wait for other processes.  While they do, the other streams move on, and where
// none can, the host polls, asks whether a peer is gone, and gives up in the end.  How fast peers are is not drawn:
// with several processes a seed leads the interleaving, but does not replay it.
//
// device.cpp has the streams and who runs them, capture.cpp and replay.cpp the graphs; here is what the wheel calls.
#include "acl/acl.h"
#include "acl/acl_op_compiler.h"
#include "capture.h"
#include "device.h"

#include <cstdio>
#include <cstring>

using namespace device;

namespace {

// As many as a server of A2 has.  They are apart by number, in what a process says and is told; their memory is the
// host's, and streams are whose they are.
constexpr int32_t kDevices = 8;
int contexts[kDevices];
thread_local int32_t current = 0;

Kind kind_of(aclrtMemcpyKind kind) {
  if (kind == ACL_MEMCPY_HOST_TO_DEVICE) return TO_DEVICE;
  return kind == ACL_MEMCPY_DEVICE_TO_HOST ? TO_HOST : ON_DEVICE;
}

// To the stream, or to the graph that it is captured for.
aclError issue(aclrtStream handle, Task task) {
  Guard guard(m.queues);
  Stream* stream = stream_of(handle);
  if (stream->changed) return change_nothing(stream);
  if (stream->lane) return capture(stream, std::move(task));
  enqueue(handle, std::move(task));
  return 0;
}

}  // namespace

extern "C" {

// --- for the operator library and for Python ---------------------------------

// Defer an operator to a stream: it begins and ends, and other streams may move in between.
aclError emulator_enqueue(aclrtStream handle, Run run, int64_t executor, void* workspace, uint64_t bytes) {
  Launch launch{run, executor, workspace, bytes};
  Entry entry{OPERATOR, 0, executor, 0};
  Guard guard(m.queues);
  Stream* stream = stream_of(handle);
  if (stream->changed) return change(stream, launch);
  if (stream->lane) return capture_operator(stream, entry, launch);
  for (Phase phase : {BEGIN, END})
    enqueue(handle, {entry, [=] { return launch(phase) == 0; }, phase == BEGIN});
  return 0;
}

// Defer a collective, which `issue` makes: `kPhases` tasks, each of which waits until `turn` says that it can run.
aclError emulator_enqueue_collective(aclrtStream handle, Issue issue, Turn turn, void* collective, int64_t subject,
                                     int64_t bytes, Range reads) {
  Entry entry{COLLECTIVE, 0, subject, bytes};
  Guard guard(m.queues);
  Stream* stream = stream_of(handle);
  if (stream->lane) return capture_collective(stream, entry, issue, turn, collective, reads);
  for (Task& task : tasks_of(entry, turn, issue(collective, false))) enqueue(handle, std::move(task));
  return 0;
}

// Wait on the host for what other processes do; meanwhile the device runs.  1: `done`; 0: a fault, or it took too long.
int emulator_wait(int (*done)(void*), void* subject) {
  return drive([=] { return done(subject) != 0; }, true);
}

// For a host that waits for something else than its device: run what can run, until `done`, unless somebody drives.
void emulator_help(int (*done)()) {
  help([=] { return done() != 0; });
}

uint64_t emulator_thrown_away() { return m.thrown_away; }

void emulator_seed(uint64_t seed) {
  Guard guard(m.queues);
  m.seed = seed;
  m.draw.seed(seed);
  for (Stream* stream : m.streams) stream->priority = fraction();
}

void emulator_leave() { m.leaving = true; }
void emulator_message(const char* message) { m.message = message; }
int64_t emulator_trace_length() { return static_cast<int64_t>(m.trace.size()); }
const void* emulator_trace_entries() { return m.trace.data(); }

void emulator_trace(int on) {
  m.tracing = on;
  m.trace.clear();
}

// After a fault nothing runs any more, as on a device; this throws away what waits and starts afresh.
int emulator_recover() {
  std::vector<std::deque<Task>> dropped;  // what they hold goes without a lock
  Guard guard(m.queues);
  if (!m.faulted) return 0;
  for (Stream* stream : m.streams) {
    for (Task& task : stream->queue)
      if (task.entry.kind == RECORD) task.run();  // so that nobody waits for ever for what was thrown away
    dropped.push_back(std::move(stream->queue));
    stream->queue.clear();
  }
  recover_graphs();
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
  if (aclError refused = may_block("rtMemcpy")) return refused;
  memcpy(to, from, bytes);
  Guard guard(m.queues);
  note({kind_of(kind), 0, 0, static_cast<int64_t>(bytes)});
  return 0;
}

aclError aclrtMemcpyAsync(void* to, size_t, const void* from, size_t bytes, aclrtMemcpyKind kind, aclrtStream stream) {
  Entry entry{kind_of(kind), 0, 0, static_cast<int64_t>(bytes)};
  Guard guard(m.queues);
  const void* host = entry.kind == TO_DEVICE ? from : entry.kind == TO_HOST ? to : nullptr;
  bool pageable = host && !inside(m.pinned, host);
  if (pageable && stream_of(stream)->lane) return may_wait(stream_of(stream));  // would wait for the stream first
  if (pageable && entry.kind == TO_DEVICE) {  // read before the call returns, as from memory that may be paged out
    std::string held(static_cast<const char*>(from), bytes);
    return issue(stream, {entry, [=] { memcpy(to, held.data(), bytes); return true; }});
  }
  Task copy{entry, [=] { memcpy(to, from, bytes); return true; }};
  copy.reads = {static_cast<const char*>(from), bytes};
  return issue(stream, std::move(copy));
}

aclError aclrtMemset(void* to, size_t, int32_t value, size_t bytes) {
  if (aclError refused = may_block("rtMemset")) return refused;
  memset(to, value, bytes);
  return 0;
}

aclError aclrtMemsetAsync(void* to, size_t, int32_t value, size_t bytes, aclrtStream stream) {
  return issue(stream, {{FILL, 0, 0, static_cast<int64_t>(bytes)}, [=] { memset(to, value, bytes); return true; }});
}

// A hint to the cache: it takes its turn on the stream and moves nothing.
aclError aclrtCmoAsync(void*, size_t bytes, aclrtCmoType, aclrtStream stream) {
  return issue(stream, {{PREFETCH, 0, 0, static_cast<int64_t>(bytes)}, [] { return true; }});
}

// --- streams ---------------------------------------------------------------------

aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  Guard guard(m.queues);
  stream_of(nullptr);
  *stream = add_stream();
  return 0;
}

aclError aclrtCreateStream(aclrtStream* stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }
aclError aclrtDestroyStream(aclrtStream) { return 0; }
aclError aclrtDestroyStreamForce(aclrtStream) { return 0; }
aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) { *id = stream_of(stream)->id; return 0; }

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
  Guard guard(m.queues);
  if (aclError refused = may_wait(stream_of(stream))) return refused;
  *status = idle(stream) ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return 0;
}

aclError aclrtSynchronizeStream(aclrtStream stream) {
  if (aclError refused = may_wait(stream_of(stream))) return refused;
  return drive([=] { return idle(stream); }) ? 0 : kFault;
}

aclError aclrtSynchronizeDevice() {
  if (aclError refused = may_wait_for_all()) return refused;
  return drive(all_idle) ? 0 : kFault;
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) { return aclrtSynchronizeStream(stream); }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }

// --- events ----------------------------------------------------------------------

aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) { *event = new Event; return 0; }
aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t) { *event = new Event; return 0; }
aclError aclrtCreateEvent(aclrtEvent* event) { *event = new Event; return 0; }
aclError aclrtDestroyEvent(aclrtEvent) { return 0; }  // kept: tasks that wait for it may still be queued

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream) {
  auto* event = static_cast<Event*>(handle);
  Guard guard(m.queues);
  if (stream_of(stream)->lane) return capture_record(stream_of(stream), event);
  event->lane = nullptr;
  Mark mark = event->last = std::make_shared<bool>(false);
  return issue(stream, {{RECORD, 0, reinterpret_cast<int64_t>(handle), 0}, [=] { return *mark = true; }});
}

aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus* status) {
  Guard guard(m.queues);
  if (aclError refused = may_ask(static_cast<Event*>(handle))) return refused;
  const Mark& mark = static_cast<Event*>(handle)->last;
  *status = !mark || *mark ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return 0;
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent handle) {
  Guard guard(m.queues);
  auto* event = static_cast<Event*>(handle);
  if (event->lane || stream_of(stream)->lane) return capture_wait(stream_of(stream), event);
  Mark mark = event->last;
  return issue(stream, {{WAIT, 0, reinterpret_cast<int64_t>(handle), 0}, nullptr, true, [=] { return !mark || *mark; }});
}

aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  if (aclError refused = may_ask(static_cast<Event*>(handle))) return refused;
  Mark mark = static_cast<Event*>(handle)->last;
  return !mark || drive([=] { return *mark; }) ? 0 : kFault;
}

// Words in device memory that a stream waits for and writes; the wheel's external events.
aclError aclrtValueWrite(void* word, uint64_t value, uint32_t, aclrtStream stream) {
  auto write = [=] { return memcpy(word, &value, sizeof value) != nullptr; };
  return issue(stream, {{VALUE_WRITE, 0, reinterpret_cast<int64_t>(word), 0}, write});
}

aclError aclrtValueWait(void* word, uint64_t value, uint32_t how, aclrtStream stream) {
  auto holds = [=] {
    uint64_t found;
    memcpy(&found, word, sizeof found);
    return how == 0 ? found >= value : how == 1 ? found == value : how == 2 ? (found & value) != 0 : ~(found | value) != 0;
  };
  return issue(stream, {{VALUE_WAIT, 0, reinterpret_cast<int64_t>(word), 0}, nullptr, true, holds});
}

aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent, aclrtEvent) { *milliseconds = 0; return 0; }

}  // extern "C"
