// What a graph is, for the two files that capture it and replay it.
#pragma once

#include "capture.h"

#include <set>
#include <thread>

namespace device {

constexpr aclError kInvalid = 107000, kNoFile = 107009, kBadHandle = 107017, kDependency = 107024, kUnjoined = 107025,
                   kBeingCaptured = 107026, kStreamCaptured = 107027, kEventCaptured = 107028, kNotCaptured = 107029,
                   kModeRefuses = 107030, kConflict = 107032, kGroupStatus = 107033, kUnmatched = 107036,
                   kRunning = 107037, kWrongThread = 107038, kNoFeature = 207000, kNoStreams = 207008,
                   kNotUpdatable = 207019, kUpdateFailed = 507000, kInvalidated = 507903;

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
  size_t place = 0;  // in the order of capture
};

struct Graph;

struct Lane {
  Graph* graph;
  Stream* captured;
  std::vector<Step> steps;
  Group* open = nullptr;
  Stream runs{};  // where replays run it; one of the device's streams for as long
};

struct Group {
  std::vector<std::shared_ptr<Slot>> slots;
  std::vector<Held> changes;
  Stream* changed_on = nullptr;
  bool misused = false;  // something else than an operator was issued there
};

struct Graph {
  int64_t number;
  aclmdlRICaptureMode mode;
  std::thread::id thread;
  bool active = true;
  std::string invalid;                       // why the capture will end without a graph; empty: it is well so far
  std::vector<std::unique_ptr<Lane>> lanes;  // the first one is of the stream on which the capture began
  std::vector<std::vector<Lane*>> waiters;   // of each record
  std::vector<Event*> events;
  std::vector<std::unique_ptr<Group>> groups;
  Mark busy = std::make_shared<bool>(false);  // until the last replay that was issued is over
  int64_t replays = 0;  // issued, and not over
  size_t steps = 0;
  Run run = nullptr;  // Python, where it has operators

  void tell(Phase phase, Range range = {}) const {
    if (run && !m.leaving) run(number, phase, const_cast<char*>(range.begin), range.bytes);
  }
  ~Graph() { tell(GONE); }
};

struct Graphs {
  std::set<Graph*> all;
  int64_t made = 0;
  int64_t streams = 2048, depth = 2048;  // of the device, and tasks that one holds; more of them take another stream
  int modes[3] = {};                     // how many captures of each mode are active
};
extern Graphs& graphs;

std::string title(const Graph* graph);
std::string title(const Stream* stream);
Graph* known(aclmdlRI model);  // empty: there is no such one

// An operator that a graph has, or will have.
Held hold(const Launch& launch);

// Refuse something, and with it the capture in which it was issued.
aclError refuse_capture(Graph* graph, aclError status, const std::string& message);

// Out of all lists; what it held goes with it, for the caller to let go of without a lock.
std::unique_ptr<Graph> take(Graph* graph);

}  // namespace device
