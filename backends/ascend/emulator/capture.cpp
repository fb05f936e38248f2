// Graphs: capture, replay and update, as CANN's runtime does them for an A2 (aclmdlRI...).  See runtime.cpp.
//
// Between begin and end nothing runs on a captured stream, nor on one that has waited for an event that was recorded on
// a captured one: tasks become steps of a lane of the graph, one lane for each stream, with the records and waits
// between them.  A replay is one task of the stream that it is issued on.  When its turn comes, the steps go to streams
// of the graph's own, one for each lane, and the seed interleaves them with everything else; what is behind the replay
// on its stream waits until all lanes are done.  A graph's replays follow each other.
//
// A task group is the operators between its begin and end.  What is issued between the begin and the end of an update
// does not run: it takes the places of the group's operators when the update stream comes to it.  An operator that has
// begun keeps what it began with, so an update that comes late changes the next replay, as on a device.
//
// Statuses and what they are for follow CANN's runtime (its capture of streams), where nothing else is said.
#include "capture.h"

#include <algorithm>
#include <cstdio>
#include <set>
#include <thread>

namespace device {

// --- what a graph is -------------------------------------------------------------------

constexpr aclError kInvalid = 107000, kBadHandle = 107017, kDependency = 107024, kUnjoined = 107025,
                   kStreamCaptured = 107027, kEventCaptured = 107028, kNotCaptured = 107029, kModeRefuses = 107030,
                   kConflict = 107032, kGroupStatus = 107033, kUnmatched = 107036, kRunning = 107037,
                   kWrongThread = 107038, kNoFeature = 207000, kNoStreams = 207008, kNotUpdatable = 207019,
                   kUpdateFailed = 507000, kInvalidated = 507903;

using Held = std::shared_ptr<const Launch>;  // Python lets go of the operator with the last one

struct Slot {
  Held now;     // what the next replay to come here runs
  Held issued;  // what it will be after all updates that were issued
};

// One of: an operator in a slot, a collective, a record, a wait, or another task, which runs as it is.
struct Step {
  Task task;
  std::shared_ptr<Slot> slot = nullptr;
  Issue issue = nullptr;
  Turn turn = nullptr;
  void* collective = nullptr;
  int64_t record = -1, wait = -1;
};

struct Graph;

struct Lane {
  Graph* graph;
  Stream* captured;
  std::vector<Step> steps;
  Group* open = nullptr;
  Stream* runs = nullptr;  // where replays run it
};

struct Group {
  Graph* graph;
  std::vector<std::shared_ptr<Slot>> slots;
  std::vector<Held> changes;
  Stream* changed_on = nullptr;
};

struct Graph {
  int64_t number;
  aclmdlRICaptureMode mode;
  std::thread::id thread;
  bool active = true, invalid = false;
  std::vector<std::unique_ptr<Lane>> lanes;       // the first one is of the stream on which the capture began
  std::vector<std::vector<Lane*>> waiters;        // of each record
  std::vector<Event*> events;
  std::vector<std::unique_ptr<Group>> groups;
  Mark busy = std::make_shared<bool>(false);  // until the last replay that was issued is over
  int64_t replays = 0;                        // issued, and not over
};

namespace {

struct Graphs {
  std::set<Graph*> all;
  int64_t made = 0;
  int64_t streams = 2048, depth = 2048;  // of the device, and tasks that one holds; more of them take another stream
  int modes[3] = {};                     // how many captures of each mode are active
};
Graphs& graphs = *new Graphs;

thread_local int own_modes[3] = {};  // of captures that began in this thread
thread_local aclmdlRICaptureMode exchanged = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;

std::string title(const Graph* graph) { return "graph " + std::to_string(graph->number); }
std::string title(const Stream* stream) { return "stream_id=" + std::to_string(stream->id); }

int64_t streams_taken() {
  int64_t taken = 0;
  for (Graph* graph : graphs.all)
    for (auto& lane : graph->lanes) taken += 1 + lane->steps.size() / graphs.depth;
  return taken;
}

void invalidate(Graph* graph) { graph->invalid = true; }

aclError room(Graph* graph) {
  if (streams_taken() <= graphs.streams) return 0;
  invalidate(graph);
  return refuse(kNoStreams, title(graph) + ": no stream resource: graphs have " + std::to_string(graphs.streams) +
                                " streams, one for each that is captured and one more for every " +
                                std::to_string(graphs.depth) + " tasks on it");
}

aclError add(Stream* stream, Step step) {
  Lane* lane = stream->lane;
  step.task.entry.stream = reinterpret_cast<int64_t>(stream);
  step.task.entry.graph = lane->graph->number;
  lane->steps.push_back(std::move(step));
  return lane->steps.size() % graphs.depth ? 0 : room(lane->graph);
}

// Streams and events are again what they were before; the graph is not captured any more.
void leave(Graph* graph) {
  if (!graph->active) return;
  graph->active = false;
  graphs.modes[graph->mode]--;
  if (graph->thread == std::this_thread::get_id()) own_modes[graph->mode]--;
  for (auto& lane : graph->lanes) {
    if (lane->open) graph->groups.emplace_back(lane->open);
    lane->open = nullptr;
    lane->captured->lane = nullptr;
  }
  for (Event* event : graph->events) event->lane = nullptr;
}

// Out of all lists; what it held goes with it, for the caller to let go of without a lock.
std::unique_ptr<Graph> take(Graph* graph) {
  leave(graph);
  graphs.all.erase(graph);
  m.graphs--;
  for (auto& lane : graph->lanes) {
    m.streams.erase(std::remove(m.streams.begin(), m.streams.end(), lane->runs), m.streams.end());
    delete lane->runs;
  }
  return std::unique_ptr<Graph>(graph);
}

// Empty, or why the graph is none.
std::string unjoined(const Graph* graph) {
  std::set<const Lane*> joined{graph->lanes[0].get()};
  for (bool more = true; more;) {
    more = false;
    for (auto& lane : graph->lanes) {
      if (joined.count(lane.get()) || lane->steps.empty() || lane->steps.back().record < 0) continue;
      for (Lane* waiter : graph->waiters[lane->steps.back().record])
        if (joined.count(waiter)) more = joined.insert(lane.get()).second;
    }
  }
  for (auto& lane : graph->lanes)
    if (!joined.count(lane.get()))
      return "capture model contains a stream that was not joined to the original stream: " + title(lane->captured);
  return "";
}

Held hold(const Launch& launch) {
  return Held(new Launch(launch), [](const Launch* held) {
    if (!m.leaving) (*held)(FORGET);
    delete held;
  });
}

Graph* known(aclmdlRI model) {
  auto* graph = static_cast<Graph*>(model);
  return graphs.all.count(graph) ? graph : nullptr;
}

Group* known_group(aclrtTaskGrp handle) {
  for (Graph* graph : graphs.all)
    for (auto& group : graph->groups)
      if (group.get() == handle) return group.get();
  return nullptr;
}

// --- replays ---------------------------------------------------------------------------

void put_operator(std::deque<Task>& queue, const Step& step) {
  auto slot = step.slot;
  auto running = std::make_shared<Held>();
  Entry entry = step.task.entry;
  Task begin{entry, [=] {
    {
      Guard guard(m.queues);
      *running = slot->now;
      Entry now = entry;
      now.subject = (*running)->executor;
      note(now);
    }
    return (**running)(REPLAY_BEGIN) == 0;
  }, false};
  begin.blame = [=] { (*slot->now)(BLAME); };
  queue.push_back(std::move(begin));
  queue.push_back({entry, [=] { return (**running)(REPLAY_END) == 0; }, false});
}

std::deque<Task> replayed(const Lane& lane, const std::vector<Mark>& marks) {
  std::deque<Task> queue;
  for (const Step& step : lane.steps) {
    if (step.slot) {
      put_operator(queue, step);
    } else if (step.issue) {
      for (Task& task : tasks_of(step.task.entry, step.turn, step.issue(step.collective, true)))
        queue.push_back(std::move(task));
    } else {
      Task task = step.task;
      if (step.record >= 0) task.run = [mark = marks[step.record]] { return *mark = true; };
      if (step.wait >= 0) task.ready = [mark = marks[step.wait]] { return *mark; };
      queue.push_back(std::move(task));
    }
  }
  return queue;
}

}  // namespace

// --- capturing -------------------------------------------------------------------------

aclError capture(Stream* stream, Task task) {
  Guard guard(m.queues);
  return add(stream, {std::move(task)});
}

aclError capture_operator(Stream* stream, Entry entry, const Launch& launch) {
  Guard guard(m.queues);
  auto slot = std::make_shared<Slot>();
  slot->now = slot->issued = hold(launch);
  if (Group* group = stream->lane->open) group->slots.push_back(slot);
  return add(stream, {{entry}, slot});
}

aclError capture_collective(Stream* stream, Entry entry, Issue issue, Turn turn, void* collective) {
  Guard guard(m.queues);
  return add(stream, {{entry}, nullptr, issue, turn, collective});
}

aclError capture_record(Stream* stream, Event* event) {
  Guard guard(m.queues);
  Lane* lane = stream->lane;
  Graph* graph = lane->graph;
  event->lane = lane;
  event->record = graph->waiters.size();
  graph->events.push_back(event);
  graph->waiters.emplace_back();
  Step step{{{RECORD, 0, reinterpret_cast<int64_t>(event), 0}}};
  step.record = event->record;
  return add(stream, std::move(step));
}

aclError capture_wait(Stream* stream, Event* event) {
  Guard guard(m.queues);
  if (!event->lane) {
    invalidate(stream->lane->graph);
    return refuse(kDependency, title(stream->lane->graph) + ": dependency created on uncaptured work in another stream: " +
                                   title(stream) + " is captured and waits for an event that was not recorded in it");
  }
  Graph* graph = event->lane->graph;
  if (!stream->lane) {
    graph->lanes.emplace_back(new Lane{graph, stream, {}});
    stream->lane = graph->lanes.back().get();
    if (aclError refused = room(graph)) return refused;
  } else if (stream->lane->graph != graph) {
    invalidate(graph);
    invalidate(stream->lane->graph);
    return refuse(kConflict, title(stream) + " is captured in " + title(stream->lane->graph) +
                                 " and waits for an event of " + title(graph));
  }
  graph->waiters[event->record].push_back(stream->lane);
  Step step{{{WAIT, 0, reinterpret_cast<int64_t>(event), 0}}};
  step.wait = event->record;
  return add(stream, std::move(step));
}

aclError change(Stream* stream, const Launch& launch) {
  Guard guard(m.queues);
  stream->changed->changes.push_back(hold(launch));
  return 0;
}

// --- what a capture forbids ---------------------------------------------------------------

aclError may_wait(Stream* stream) {
  Guard guard(m.queues);
  return stream->lane ? refuse(kStreamCaptured, "Not allow to synchronize captured-stream, " + title(stream)) : 0;
}

aclError may_wait_for_all() {
  Guard guard(m.queues);
  for (Stream* stream : m.streams)
    if (aclError refused = may_wait(stream)) return refused;
  return 0;
}

aclError may_ask(const Event* event) {
  Guard guard(m.queues);
  return event->lane ? refuse(kEventCaptured, "the event was recorded in a capture that goes on: the host can neither "
                                              "wait for it nor query it") : 0;
}

aclError may_block(const char* what) {
  Guard guard(m.queues);
  bool refused = false;
  if (exchanged == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL)
    refused = graphs.modes[ACL_MODEL_RI_CAPTURE_MODE_GLOBAL] || own_modes[ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL];
  if (exchanged == ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL)
    refused = own_modes[ACL_MODEL_RI_CAPTURE_MODE_GLOBAL] || own_modes[ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL];
  return refused ? refuse(kModeRefuses, std::string(what) + ": operation not permitted when a stream is capturing and "
                                                            "the specified capture mode is not relaxed") : 0;
}

void recover_graphs() {
  Guard guard(m.queues);
  for (Graph* graph : graphs.all) {
    graph->busy = std::make_shared<bool>(false);
    graph->replays = 0;
    if (graph->active) invalidate(graph);
  }
}

}  // namespace device

using namespace device;

extern "C" {

void emulator_limits(int64_t streams, int64_t depth) {
  Guard guard(m.queues);
  graphs.streams = streams;
  graphs.depth = depth;
}

aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode mode) {
  Guard guard(m.queues);
  Stream* stream = stream_of(handle);
  if (!handle) return refuse(kNoFeature, "The default stream cannot be used in the ACL Graph");
  if (stream->lane) return refuse(kStreamCaptured, title(stream) + " is already in capture status");
  auto* graph = new Graph{++graphs.made, mode, std::this_thread::get_id()};
  graphs.all.insert(graph);
  m.graphs++;
  graphs.modes[mode]++;
  own_modes[mode]++;
  graph->lanes.emplace_back(new Lane{graph, stream, {}});
  stream->lane = graph->lanes[0].get();
  if (aclError refused = room(graph)) {
    take(graph);
    return refused;
  }
  return 0;
}

aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus* status, aclmdlRI* model) {
  Guard guard(m.queues);
  Lane* lane = stream_of(handle)->lane;
  if (status)
    *status = !lane                  ? ACL_MODEL_RI_CAPTURE_STATUS_NONE
              : lane->graph->invalid ? ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED
                                     : ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE;
  if (model) *model = lane ? lane->graph : nullptr;
  return 0;
}

// Empty, or why what was captured is no graph.
static aclError flawed(Graph* graph) {
  if (graph->mode != ACL_MODEL_RI_CAPTURE_MODE_RELAXED && graph->thread != std::this_thread::get_id())
    return refuse(kWrongThread, title(graph) + ": the capture must end in the thread in which it began");
  if (graph->invalid) return refuse(kInvalidated, title(graph) + ": an error has invalidated the capture");
  for (auto& lane : graph->lanes)
    if (lane->open) return refuse(kGroupStatus, title(graph) + ": a task group is not closed on " + title(lane->captured));
  std::string who = unjoined(graph);
  return who.empty() ? 0 : refuse(kUnjoined, title(graph) + ": " + who);
}

aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI* model) {
  std::unique_ptr<Graph> dropped;
  std::vector<Held> kept;
  {
    Guard guard(m.queues);
    *model = nullptr;
    Stream* stream = stream_of(handle);
    if (!stream->lane) return refuse(kNotCaptured, title(stream) + " is not in capture status");
    Graph* graph = stream->lane->graph;
    if (stream->lane != graph->lanes[0].get())
      return refuse(kUnmatched, title(graph) + ": the capture was not initiated in " + title(stream));
    if (aclError refused = flawed(graph)) {
      dropped = take(graph);
      return refused;
    }
    leave(graph);
    for (auto& lane : graph->lanes) {
      lane->runs = add_stream();
      for (Step& step : lane->steps)
        if (step.slot) kept.push_back(step.slot->now);
    }
    *model = graph;
  }
  for (const Held& launch : kept) (*launch)(KEEP);
  return 0;
}

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
  std::swap(*mode, exchanged);
  return 0;
}

aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream handle) {
  Guard guard(m.queues);
  Graph* graph = known(model);
  if (!graph) return refuse(kInvalid, "replay: there is no such graph");
  if (graph->active) return refuse(107026, title(graph) + ": replay: it is being captured");
  if (stream_of(handle)->lane) return refuse(kStreamCaptured, title(graph) + ": replay: the stream is being captured");
  std::vector<Mark> marks;
  for (size_t index = 0; index < graph->waiters.size(); index++) marks.push_back(std::make_shared<bool>(false));
  auto waiting = std::make_shared<std::vector<std::deque<Task>>>();
  Mark busy = std::make_shared<bool>(true);
  auto left = std::make_shared<size_t>(graph->lanes.size());
  for (auto& lane : graph->lanes) {
    waiting->push_back(replayed(*lane, marks));
    waiting->back().push_back({{}, [=] {
      Guard guard(m.queues);
      if (--*left == 0) *busy = false, graph->replays--;
      return true;
    }, false});
  }
  Task begin{{REPLAY, 0, graph->number, 0}, [=] {
    Guard guard(m.queues);
    for (size_t index = 0; index < waiting->size(); index++) {
      Stream* runs = graph->lanes[index]->runs;
      runs->priority = fraction();
      runs->queue = std::move((*waiting)[index]);
    }
    return true;
  }};
  begin.ready = [before = graph->busy] { return !*before; };
  enqueue(handle, std::move(begin));
  enqueue(handle, {{}, nullptr, false, [=] { return !*busy; }});
  graph->busy = busy;
  graph->replays++;
  return 0;
}

aclError aclmdlRIDestroy(aclmdlRI model) {
  std::unique_ptr<Graph> dropped;
  Guard guard(m.queues);
  Graph* graph = known(model);
  if (!graph) return refuse(kInvalid, "destroy: there is no such graph");
  if (graph->active) return refuse(107026, title(graph) + ": destroy: it is being captured");
  if (graph->replays) return refuse(kRunning, title(graph) + ": destroy: the graph is still running");
  dropped = take(graph);
  return 0;
}

aclError aclmdlRIGetId(aclmdlRI model, uint32_t* number) {
  Guard guard(m.queues);
  Graph* graph = known(model);
  if (!graph) return refuse(kInvalid, "there is no such graph");
  *number = static_cast<uint32_t>(graph->number);
  return 0;
}

// --- task groups -------------------------------------------------------------------------

aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle) {
  Guard guard(m.queues);
  Stream* stream = stream_of(handle);
  if (!stream->lane) return refuse(kNotCaptured, title(stream) + " is not in the capture stage");
  if (stream->lane->open) return refuse(kGroupStatus, "a task group is repeatedly started on " + title(stream));
  stream->lane->open = new Group{stream->lane->graph};
  return 0;
}

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream handle, aclrtTaskGrp* group) {
  Guard guard(m.queues);
  *group = nullptr;
  Stream* stream = stream_of(handle);
  if (!stream->lane) return refuse(kNotCaptured, title(stream) + " is not in the capture stage");
  if (!stream->lane->open) return refuse(kGroupStatus, "no task group was started on " + title(stream));
  stream->lane->graph->groups.emplace_back(stream->lane->open);
  *group = stream->lane->open;
  stream->lane->open = nullptr;
  return 0;
}

aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream handle, aclrtTaskGrp wanted) {
  Guard guard(m.queues);
  Stream* stream = stream_of(handle);
  Group* group = known_group(wanted);
  if (!group) return refuse(kBadHandle, "update: there is no such task group: its graph is gone");
  if (stream->lane) return refuse(kStreamCaptured, "update: " + title(stream) + " is being captured");
  if (stream->changed) return refuse(kGroupStatus, "update: " + title(stream) + " is already in task update mode");
  if (group->changed_on) return refuse(kGroupStatus, "update: the handle only can be updated by one stream");
  stream->changed = group;
  group->changed_on = stream;
  return 0;
}

aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream handle) {
  Stream* stream = stream_of(handle);
  std::vector<Held> changes, before;
  std::vector<std::shared_ptr<Slot>> slots;
  {
    Guard guard(m.queues);
    Group* group = stream->changed;
    if (!group) return refuse(kGroupStatus, "update: " + title(stream) + " is not in task update mode");
    stream->changed = nullptr;
    group->changed_on = nullptr;
    changes.swap(group->changes);
    slots = group->slots;
    for (auto& slot : slots) before.push_back(slot->issued);
  }
  if (changes.size() != slots.size())
    return refuse(kUpdateFailed, "update: the task group has " + std::to_string(slots.size()) +
                                     " operators: got " + std::to_string(changes.size()));
  for (size_t index = 0; index < changes.size(); index++) {
    const Launch& launch = *changes[index];
    auto* old = reinterpret_cast<void*>(before[index]->executor);
    if (int refused = launch.run(launch.executor, COMPARE, old, 0)) return refused;
  }
  Guard guard(m.queues);
  for (size_t index = 0; index < changes.size(); index++) {
    auto slot = slots[index];
    Held change = slot->issued = changes[index];
    auto replaced = std::make_shared<Held>();  // goes with the task, without a lock
    enqueue(handle, {{UPDATE, 0, change->executor, 0}, [=] {
      {
        Guard guard(m.queues);
        *replaced = slot->now;
        slot->now = change;
      }
      return (*change)(CHANGE) == 0;
    }});
  }
  return 0;
}

// --- looking at one ------------------------------------------------------------------------

aclError aclmdlRIDebugJsonPrint(aclmdlRI model, const char* path, uint32_t) {
  static const char* const names[] = {"KERNEL", "EVENT_RECORD", "EVENT_WAIT", "MEMCPY_ASYNC", "MEMCPY_ASYNC",
                                      "MEMCPY_ASYNC", "MEMSET_ASYNC", "COLLECTIVE", "CMO", "VALUE_WAIT", "VALUE_WRITE"};
  Guard guard(m.queues);
  Graph* graph = known(model);
  if (!graph) return refuse(kInvalid, "there is no such graph");
  FILE* file = fopen(path, "w");
  if (!file) return refuse(107009, std::string("the file cannot be opened: ") + path);
  fprintf(file, "[");
  const char* between = "\n";
  for (auto& lane : graph->lanes)
    for (size_t index = 0; index < lane->steps.size(); index++) {
      const Entry& entry = lane->steps[index].task.entry;
      fprintf(file, "%s{\"name\": \"%s\", \"ph\": \"X\", \"pid\": \"aclGraph\", \"tid\": \"stream%d\", \"ts\": %zu, "
                    "\"dur\": 1, \"args\": {\"Model Id\": %ld, \"Stream Id\": %d, \"Task Id\": %zu, \"Task Type\": \"%s\"}}",
              between, names[entry.kind], lane->captured->id, index, graph->number, lane->captured->id, index,
              names[entry.kind]);
      between = ",\n";
    }
  fprintf(file, "\n]\n");
  fclose(file);
  return 0;
}

}  // extern "C"
