// Graphs: what is captured, and what a capture forbids, as CANN's runtime has it for an A2 (aclmdlRICapture...).
//
// Between begin and end nothing runs on a captured stream, nor on one that has waited for an event that was recorded on
// a captured one: tasks become steps of a lane of the graph, one lane for each stream, with the records and waits
// between them.  replay.cpp says what a replay does with them.
//
// Statuses and what they are for follow CANN's runtime (its capture of streams), where nothing else is said.
#include "graph.h"

namespace device {

Graphs& graphs = *new Graphs;

std::string title(const Graph* graph) { return "graph " + std::to_string(graph->number); }
std::string title(const Stream* stream) { return "stream_id=" + std::to_string(stream->id); }

Graph* known(aclmdlRI model) {
  auto* graph = static_cast<Graph*>(model);
  return graphs.all.count(graph) ? graph : nullptr;
}

aclError refuse_capture(Graph* graph, aclError status, const std::string& message) {
  if (graph->invalid.empty()) graph->invalid = message + " (" + std::to_string(status) + ")";
  return refuse(status, title(graph) + ": " + message);
}

namespace {

thread_local int own_modes[3] = {};  // of captures that began in this thread
thread_local aclmdlRICaptureMode exchanged = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;

int64_t streams_taken() {
  int64_t taken = 0;
  for (Graph* graph : graphs.all)
    for (auto& lane : graph->lanes) taken += 1 + lane->steps.size() / graphs.depth;
  return taken;
}

aclError room(Graph* graph) {
  if (streams_taken() <= graphs.streams) return 0;
  return refuse_capture(graph, kNoStreams, "no stream resource: graphs have " + std::to_string(graphs.streams) +
                                " streams, one for each that is captured and one more for every " +
                                std::to_string(graphs.depth) + " tasks on it");
}

aclError add(Stream* stream, Step step) {
  Lane* lane = stream->lane;
  step.task.entry.stream = reinterpret_cast<int64_t>(stream);
  step.task.entry.graph = lane->graph->number;
  step.place = lane->graph->steps++;
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

}  // namespace

std::unique_ptr<Graph> take(Graph* graph) {
  leave(graph);
  graphs.all.erase(graph);
  m.graphs--;
  for (auto& group : graph->groups)
    if (group->changed_on) group->changed_on->changed = nullptr;
  return std::unique_ptr<Graph>(graph);
}

Held hold(const Launch& launch) {
  return Held(new Launch(launch), [](const Launch* held) {
    if (!m.leaving) (*held)(FORGET);
    delete held;
  });
}

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

aclError capture_collective(Stream* stream, Entry entry, Issue issue, Turn turn, void* collective, Range reads) {
  Guard guard(m.queues);
  Step step{{entry}, nullptr, issue, turn, collective};
  step.task.reads = reads;
  return add(stream, std::move(step));
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
    return refuse_capture(stream->lane->graph, kDependency,
                          "dependency created on uncaptured work in another stream: " + title(stream) +
                              " is captured and waits for an event that was not recorded in it");
  }
  Graph* graph = event->lane->graph;
  if (!stream->lane) {
    graph->lanes.emplace_back(new Lane{graph, stream, {}});
    stream->lane = graph->lanes.back().get();
    if (aclError refused = room(graph)) return refused;
  } else if (stream->lane->graph != graph) {
    std::string why = title(stream) + " of " + title(stream->lane->graph) + " waits for an event of " + title(graph);
    refuse_capture(graph, kConflict, why);
    return refuse_capture(stream->lane->graph, kConflict, why);
  }
  graph->waiters[event->record].push_back(stream->lane);
  Step step{{{WAIT, 0, reinterpret_cast<int64_t>(event), 0}}};
  step.wait = event->record;
  return add(stream, std::move(step));
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
    *status = !lane                         ? ACL_MODEL_RI_CAPTURE_STATUS_NONE
              : lane->graph->invalid.empty() ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE
                                             : ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED;
  if (model) *model = lane ? lane->graph : nullptr;
  return 0;
}

// Empty, or why what was captured is no graph.
static aclError flawed(Graph* graph) {
  if (graph->mode != ACL_MODEL_RI_CAPTURE_MODE_RELAXED && graph->thread != std::this_thread::get_id())
    return refuse(kWrongThread, title(graph) + ": the capture must end in the thread in which it began");
  if (!graph->invalid.empty())
    return refuse(kInvalidated, title(graph) + ": an error has invalidated the capture: " + graph->invalid);
  for (auto& lane : graph->lanes)
    if (lane->open) return refuse(kGroupStatus, title(graph) + ": a task group is not closed on " + title(lane->captured));
  std::string who = unjoined(graph);
  return who.empty() ? 0 : refuse(kUnjoined, title(graph) + ": " + who);
}

aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI* model) {
  std::unique_ptr<Graph> dropped;
  std::map<size_t, Held> kept;  // operators, in the order of capture
  std::vector<Range> read;
  Graph* graph;
  {
    Guard guard(m.queues);
    *model = nullptr;
    Stream* stream = stream_of(handle);
    if (!stream->lane) return refuse(kNotCaptured, title(stream) + " is not in capture status");
    graph = stream->lane->graph;
    if (stream->lane != graph->lanes[0].get())
      return refuse(kUnmatched, title(graph) + ": the capture was not initiated in " + title(stream));
    if (aclError refused = flawed(graph)) {
      dropped = take(graph);
      return refused;
    }
    leave(graph);
    for (auto& lane : graph->lanes)
      for (Step& step : lane->steps)
        if (step.slot) kept[step.place] = step.slot->now;
        else if (step.task.reads.bytes) read.push_back(step.task.reads);
    if (!kept.empty()) graph->run = kept.begin()->second->run;
    *model = graph;
  }
  for (const Range& range : read) graph->tell(PROTECT, range);
  for (auto& [place, launch] : kept)
    launch->run(launch->executor, KEEP, reinterpret_cast<void*>(graph->number), 0);
  return 0;
}

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
  std::swap(*mode, exchanged);
  return 0;
}

}  // extern "C"
