// Graphs: replays and updates, as CANN's runtime has them for an A2 (aclmdlRI...).
//
// A replay is one task of the stream that it is issued on.  When its turn comes, the steps go to streams of the graph's
// own, one for each lane, and the seed interleaves them with everything else; what is behind the replay on its stream
// waits until all lanes are done.  A graph's replays follow each other.
//
// A task group is the operators between its begin and end.  What is issued between the begin and the end of an update
// does not run: it takes the places of the group's operators when the update stream comes to it.  An operator that has
// begun keeps what it began with, so an update that comes late changes the next replay, as on a device.
#include "graph.h"

#include <algorithm>
#include <cstdio>

namespace device {

namespace {

Group* known_group(aclrtTaskGrp handle) {
  for (Graph* graph : graphs.all)
    for (auto& group : graph->groups)
      if (group.get() == handle) return group.get();
  return nullptr;
}

void retire(Stream* runs) { m.streams.erase(std::remove(m.streams.begin(), m.streams.end(), runs), m.streams.end()); }

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

aclError change(Stream* stream, const Launch& launch) {
  Guard guard(m.queues);
  stream->changed->changes.push_back(hold(launch));
  return 0;
}

aclError change_nothing(Stream* stream) {
  Guard guard(m.queues);
  stream->changed->misused = true;
  return 0;
}

void recover_graphs() {
  Guard guard(m.queues);
  for (Graph* graph : graphs.all) {
    graph->busy = std::make_shared<bool>(false);
    graph->replays = 0;
    for (auto& lane : graph->lanes) retire(&lane->runs);
    if (graph->active) graph->invalid = "a fault on the device";
    for (auto& group : graph->groups) {
      if (group->changed_on) group->changed_on->changed = nullptr;
      group->changed_on = nullptr;
      group->misused = false;
    }
  }
}

}  // namespace device

using namespace device;

extern "C" {

aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream handle) {
  Guard guard(m.queues);
  Graph* graph = known(model);
  if (!graph) return refuse(kInvalid, "replay: there is no such graph");
  if (graph->active) return refuse(kBeingCaptured, title(graph) + ": replay: it is being captured");
  if (stream_of(handle)->lane) return refuse(kStreamCaptured, title(graph) + ": replay: the stream is being captured");
  std::vector<Mark> marks;
  for (size_t index = 0; index < graph->waiters.size(); index++) marks.push_back(std::make_shared<bool>(false));
  auto waiting = std::make_shared<std::vector<std::deque<Task>>>();
  Mark busy = std::make_shared<bool>(true);
  auto left = std::make_shared<size_t>(graph->lanes.size());
  for (auto& lane : graph->lanes) {
    waiting->push_back(replayed(*lane, marks));
    waiting->back().push_back({{}, [=, runs = &lane->runs] {
      Guard guard(m.queues);
      retire(runs);
      if (--*left == 0) *busy = false, graph->replays--;
      return true;
    }, false});
  }
  Task begin{{REPLAY, 0, graph->number, 0}, [=] {
    graph->tell(SPOIL);
    Guard guard(m.queues);
    for (size_t index = 0; index < waiting->size(); index++) {
      Stream& runs = graph->lanes[index]->runs;
      runs.priority = fraction();
      runs.queue = std::move((*waiting)[index]);
      m.streams.push_back(&runs);
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
  if (graph->active) return refuse(kBeingCaptured, title(graph) + ": destroy: it is being captured");
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
  stream->lane->open = new Group;
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
  bool misused = false;
  {
    Guard guard(m.queues);
    Group* group = stream->changed;
    if (!group) return refuse(kGroupStatus, "update: " + title(stream) + " is not in task update mode");
    stream->changed = nullptr;
    group->changed_on = nullptr;
    changes.swap(group->changes);
    std::swap(misused, group->misused);
    slots = group->slots;
    for (auto& slot : slots) before.push_back(slot->issued);
  }
  if (misused) return refuse(kNotUpdatable, "update: only operators can be updated");
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

// --- what is not emulated: graphs in graphs, which run under a condition ------------------------

aclError aclmdlRICondHandleCreate(aclmdlRI, uint32_t, aclmdlRICondHandleFlag, void**) {
  return refuse(kNoFeature, "conditional tasks are not emulated");
}

aclError aclmdlRICaptureToModelRIBegin(aclrtStream, aclmdlRI, aclmdlRICaptureMode) {
  return refuse(kNoFeature, "conditional tasks are not emulated");
}

// --- looking at one ------------------------------------------------------------------------

aclError aclmdlRIDebugJsonPrint(aclmdlRI model, const char* path, uint32_t) {
  static const char* const names[] = {"KERNEL", "EVENT_RECORD", "EVENT_WAIT", "MEMCPY_ASYNC", "MEMCPY_ASYNC",
                                      "MEMCPY_ASYNC", "MEMSET_ASYNC", "COLLECTIVE", "CMO", "VALUE_WAIT", "VALUE_WRITE"};
  Guard guard(m.queues);
  Graph* graph = known(model);
  if (!graph) return refuse(kInvalid, "there is no such graph");
  FILE* file = fopen(path, "w");
  if (!file) return refuse(kNoFile, std::string("the file cannot be opened: ") + path);
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
