// Emulated HCCL (libhccl.so): collectives between the processes of one machine, one emulated device in each.
//
// A group shares one file in /dev/shm: a board that says how far each rank is, and behind it a region for each rank's
// data (the file has holes; only what was written takes memory).  Its name is gone once all ranks have opened it, so
// nothing stays behind, however they end.  A rank holds a lock on a byte of the board, which the kernel lets go of
// when the process ends: that is how the others see it.
//
// The n-th collective of a group is three tasks of a stream, on every rank:
//
//   enter     say which one it is; what it writes becomes NaN, and may from now on be written at any time
//   deposit   when all have entered the n-th: compare what they said, then put the operand into the own region
//   collect   when all have deposited: read from the regions of all, in rank order
//
// So operands are read late, and a region is written again only when all have read it, since all must have entered the
// next collective.  Sums are in rank order, of 16-bit types in float32 and rounded once, so that all ranks get the same
// bits; a real HCCL promises neither.  Other streams move between the tasks and while they wait for peers.
//
// A device does its work by itself; this one while its host waits for it, or for the making of a group.  A host that
// waits for something else (what a peer says once it has a result, say) would keep peers waiting for ever: so where one
// has waited for a while for a collective that was issued here, a thread of its own runs the device until it is done.
#include "device.h"
#include "hccl/hccl.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

extern "C" {
aclError emulator_enqueue_collective(aclrtStream, device::Issue, device::Turn, void* collective, int64_t subject, int64_t bytes,
                                     device::Range reads);
int emulator_wait(int (*done)(void*), void* subject);
void emulator_help(int (*done)());
uint64_t emulator_thrown_away();
void emulator_message(const char*);
}

namespace {

enum Op : uint32_t { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, ALL_TO_ALL_V, BROADCAST, SEND, BARRIER };
const char* const kOps[] = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all",
                            "all_to_all_v", "broadcast", "send and recv", "barrier"};
const char* const kDtypes[] = {"int8", "int16", "int32", "fp16", "fp32", "int64",
                               "uint64", "uint8", "uint16", "uint32", "fp64", "bf16"};
const size_t kSizes[] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2};
const char* const kReductions[] = {"sum", "prod", "max", "min"};
constexpr uint32_t kMost = 64;           // ranks of a group
constexpr off_t kRegion = off_t{1} << 40;  // bytes from one rank's data to the next one's

struct What {
  uint32_t op, dtype, detail;  // detail: the reduction, or the root
  uint64_t count;
};

struct Part {
  uint64_t begin, bytes;  // of a rank's region: what is there for another one
};

struct Place {  // of a rank, on the board
  std::atomic<uint32_t> ranks, left;  // ranks: how many it thinks there are; set when it has joined
  std::atomic<uint64_t> entered, deposited, collected;  // how many collectives
  int64_t process;
  What what;  // the one it is in; this and the parts hold until all have made their deposits
  Part parts[kMost];
};

struct Board {
  Place places[kMost];
};

struct Group {
  std::string name;
  int file = -1;
  Board* board = nullptr;
  uint32_t rank = 0, ranks = 0;
  std::atomic<uint64_t> issued{0};
  uint64_t thrown_away = emulator_thrown_away();
  Place& own() { return board->places[rank]; }

  ~Group() {
    if (board) munmap(board, sizeof(Board));
    if (file >= 0) close(file);
  }
};

struct Segment {
  char* memory;
  uint64_t bytes;
};

struct Collective {
  std::shared_ptr<Group> group;
  What what;
  uint64_t number = 0;
  std::vector<Segment> sends;     // one behind the other in the own region
  std::vector<Part> parts;        // for each rank: what of that is for it
  std::vector<Part> sources;      // of each rank's region: what is for this one
  std::vector<Segment> receives;  // from each rank; all the same segment where `folds`
  bool folds = false;
  std::string refused;            // why it is none
};

void refuse(const std::string& message) { emulator_message(("emulated HCCL: " + message).c_str()); }

std::string said(const What& what) {
  std::string text = kOps[what.op];
  if (what.op == BARRIER) return text;
  if (what.op == ALL_REDUCE || what.op == REDUCE_SCATTER) text += std::string(" (") + kReductions[what.detail] + ")";
  if (what.op == BROADCAST || what.op == SEND) text += " (from rank " + std::to_string(what.detail) + ")";
  text += " of ";
  if (what.op != ALL_TO_ALL_V) text += std::to_string(what.count) + " ";
  return text + kDtypes[what.dtype];
}

// --- numbers ---------------------------------------------------------------------

struct Half { uint16_t bits; };
struct Brain { uint16_t bits; };

template <typename T, typename F> T bits_of(F from) {
  static_assert(sizeof(T) == sizeof(F));
  T to;
  memcpy(&to, &from, sizeof to);
  return to;
}

float widen(Brain x) { return bits_of<float>(static_cast<uint32_t>(x.bits) << 16); }

float widen(Half x) {
  uint32_t rest = x.bits & 0x7fffu, sign = (x.bits & 0x8000u) << 16;
  if (rest >= 0x7c00) return bits_of<float>(sign | 0x7f800000u | rest << 13);
  float magnitude = bits_of<float>(rest << 13) * 0x1p112f;  // another bias; right for subnormals too
  return bits_of<float>(sign | bits_of<uint32_t>(magnitude));
}

float widen(float x) { return x; }
template <typename T> int64_t widen(T x) { return static_cast<int64_t>(x); }

void narrow(float from, Brain* to) {
  uint32_t bits = bits_of<uint32_t>(from);
  if (std::isnan(from)) to->bits = static_cast<uint16_t>(bits >> 16 | 0x40);
  else to->bits = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void narrow(float from, Half* to) {
  uint16_t sign = std::signbit(from) ? 0x8000 : 0;
  double magnitude = std::fabs(static_cast<double>(from));
  if (std::isnan(from)) to->bits = sign | 0x7e00;
  else if (magnitude >= 65520) to->bits = sign | 0x7c00;
  else if (magnitude == 0) to->bits = sign;
  else {
    int exponent;
    std::frexp(magnitude, &exponent);
    int step = std::max(exponent - 11, -24);  // of the last bit; nearbyint takes ties to even
    to->bits = sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(magnitude, -step)) + (step + 24) * 1024);
  }
}

template <typename W, typename T> void narrow(W from, T* to) { *to = static_cast<T>(from); }

template <typename W> W fold(W left, W right, uint32_t reduction) {
  switch (reduction) {
    case HCCL_REDUCE_SUM: return left + right;
    case HCCL_REDUCE_PROD: return left * right;
    case HCCL_REDUCE_MAX: return left > right || left != left ? left : right;
    default: return left < right || left != left ? left : right;
  }
}

template <typename T> void fold_all(const std::vector<std::string>& from, char* to, uint32_t reduction) {
  auto* out = reinterpret_cast<T*>(to);
  for (size_t index = 0; index < from[0].size() / sizeof(T); index++) {
    auto at = [&](size_t rank) { return widen(reinterpret_cast<const T*>(from[rank].data())[index]); };
    auto total = at(0);
    for (size_t rank = 1; rank < from.size(); rank++) total = fold(total, at(rank), reduction);
    narrow(total, out + index);
  }
}

bool fold_as(uint32_t dtype, const std::vector<std::string>& from, char* to, uint32_t reduction) {
  switch (dtype) {
    case HCCL_DATA_TYPE_INT8: fold_all<int8_t>(from, to, reduction); return true;
    case HCCL_DATA_TYPE_INT16: fold_all<int16_t>(from, to, reduction); return true;
    case HCCL_DATA_TYPE_INT32: fold_all<int32_t>(from, to, reduction); return true;
    case HCCL_DATA_TYPE_INT64: fold_all<int64_t>(from, to, reduction); return true;
    case HCCL_DATA_TYPE_FP16: fold_all<Half>(from, to, reduction); return true;
    case HCCL_DATA_TYPE_BFP16: fold_all<Brain>(from, to, reduction); return true;
    case HCCL_DATA_TYPE_FP32: fold_all<float>(from, to, reduction); return true;
    default: return false;
  }
}

// --- the three tasks ---------------------------------------------------------------

bool all(Group& group, std::atomic<uint64_t> Place::*count, uint64_t number) {
  for (uint32_t rank = 0; rank < group.ranks; rank++)
    if ((group.board->places[rank].*count).load(std::memory_order_acquire) < number) return false;
  return true;
}

std::string title(const Collective& c) {
  return "collective " + std::to_string(c.number) + " of group " + c.group->name;
}

bool overlap(const Segment& a, const Segment& b) {
  return a.bytes && b.bytes && a.memory < b.memory + b.bytes && b.memory < a.memory + a.bytes;
}

bool enter(Collective& c) {
  Place& own = c.group->own();
  own.what = c.what;
  std::copy(c.parts.begin(), c.parts.end(), own.parts);
  for (const Segment& out : c.receives) {
    bool in_place = false;
    for (const Segment& in : c.sends) in_place |= overlap(in, out);
    if (!in_place && out.bytes) memset(out.memory, 0xff, out.bytes);
  }
  own.entered.store(c.number, std::memory_order_release);
  return true;
}

// What does not match between two ranks, empty where all does.
std::string difference(Collective& c) {
  Place* places = c.group->board->places;
  for (uint32_t rank = 1; rank < c.group->ranks; rank++) {
    const What &first = places[0].what, &other = places[rank].what;
    bool same = first.op == other.op && first.dtype == other.dtype && first.detail == other.detail;
    if (!same || first.count != other.count)
      return "rank 0 is in " + said(first) + ", rank " + std::to_string(rank) + " in " + said(other);
  }
  for (uint32_t rank = 0; rank < c.group->ranks; rank++) {
    uint64_t sent = places[rank].parts[c.group->rank].bytes, awaited = c.receives[rank].bytes;
    if (sent != awaited)
      return "rank " + std::to_string(rank) + " sends " + std::to_string(sent) + " bytes in " + said(c.what) +
             ", rank " + std::to_string(c.group->rank) + " awaits " + std::to_string(awaited);
  }
  return "";
}

bool transfer(bool write, int file, char* memory, uint64_t bytes, off_t at) {
  while (bytes) {
    ssize_t moved = write ? pwrite(file, memory, bytes, at) : pread(file, memory, bytes, at);
    if (moved <= 0) {
      if (moved < 0 && errno == EINTR) continue;
      refuse(std::string(write ? "/dev/shm does not take" : "/dev/shm does not give") + " an operand: " +
             (moved ? strerror(errno) : "it is not there"));
      return false;
    }
    memory += moved, bytes -= moved, at += moved;
  }
  return true;
}

bool deposit(Collective& c) {
  std::string wrong = difference(c);
  if (!wrong.empty()) {
    refuse(title(c) + ": must be the same on all ranks: " + wrong);
    return false;
  }
  for (uint32_t rank = 0; rank < c.group->ranks; rank++)  // now: who has collected may enter the next one and say anew
    c.sources.push_back(c.group->board->places[rank].parts[c.group->rank]);
  off_t at = sizeof(Board) + kRegion * c.group->rank;
  for (const Segment& in : c.sends) {
    if (!transfer(true, c.group->file, in.memory, in.bytes, at)) return false;
    at += in.bytes;
  }
  c.group->own().deposited.store(c.number, std::memory_order_release);
  return true;
}

bool collect(Collective& c) {
  std::vector<std::string> read(c.group->ranks);
  for (uint32_t rank = 0; rank < c.group->ranks; rank++) {
    const Part& part = c.sources[rank];
    off_t at = sizeof(Board) + kRegion * rank + part.begin;
    char* to = c.receives[rank].memory;
    if (c.folds) {
      read[rank].resize(part.bytes);
      to = &read[rank][0];
    }
    if (!transfer(false, c.group->file, to, part.bytes, at)) return false;
  }
  if (c.folds && !fold_as(c.what.dtype, read, c.receives[0].memory, c.what.detail)) {
    refuse(title(c) + ": no " + said(c.what));
    return false;
  }
  c.group->own().collected.store(c.number, std::memory_order_release);
  return true;
}

// Whether a rank has left its group, or its process has ended.
bool gone(Group& group, uint32_t rank) {
  if (rank == group.rank) return false;
  if (group.board->places[rank].left) return true;
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return fcntl(group.file, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

// Who is missing; with `hopeless`, only those that will never come.
std::string missing(Collective& c, int phase, bool hopeless) {
  std::string text;
  auto count = phase == 1 ? &Place::entered : &Place::deposited;
  for (uint32_t rank = 0; rank < c.group->ranks; rank++) {
    Place& place = c.group->board->places[rank];
    bool lost = gone(*c.group, rank);  // asked before its count is read: it may have come and then ended
    uint64_t reached = (place.*count).load(std::memory_order_acquire);
    if (reached >= c.number || (hopeless && !lost)) continue;
    text += (text.empty() ? "rank " : ", rank ") + std::to_string(rank);
    if (!lost) text += " has entered " + std::to_string(place.entered) + " collectives";
    else if (place.left) text += " has left the group";
    else text += " is gone (process " + std::to_string(place.process) + " ended)";
  }
  return text;
}

int turn(void* handle, int phase, int ask) {
  using namespace device;
  auto& c = *static_cast<Collective*>(handle);
  if (!c.refused.empty()) {
    if (ask == RUN) refuse(c.refused);
    return ask == READY;
  }
  if (ask == READY) {
    if (phase == 0) return c.group->own().collected.load() + 1 >= c.number;
    return all(*c.group, phase == 1 ? &Place::entered : &Place::deposited, c.number);
  }
  if (ask == RUN) return phase == 0 ? enter(c) : phase == 1 ? deposit(c) : collect(c);
  std::string who = phase ? missing(c, phase, ask == HOPELESS) : "";
  if (who.empty()) return 0;
  refuse(title(c) + ", " + said(c.what) + ": " + (ask == HOPELESS ? "" : "waited too long for peers: ") + who);
  return 1;
}

// --- issuing one -------------------------------------------------------------------

Collective* begin(HcclComm comm, Op op, HcclDataType dtype, uint32_t detail, uint64_t count) {
  auto* made = new Collective;  // never deleted: tasks that were thrown away may still be asked
  made->group = *static_cast<std::shared_ptr<Group>*>(comm);
  made->what = {op, static_cast<uint32_t>(dtype), detail, count};
  made->parts.resize(made->group->ranks);
  made->receives.resize(made->group->ranks);
  return made;
}

// Gives a collective its number in its group: to itself, or (`again`) to one more, for a replay of what was captured.
void* number(void* handle, int again) {
  auto* c = static_cast<Collective*>(handle);
  if (again) c = new Collective(*c);
  Group& group = *c->group;
  if (group.thrown_away != emulator_thrown_away() && group.own().collected < group.issued)
    c->refused = "group " + group.name + ": a fault threw collectives away; make the group anew";
  if (c->refused.empty()) c->number = ++group.issued;
  return c;
}

// What is refused is a fault where the host waits: what the wheel's host queue is told may reach nobody.
HcclResult issue(Collective* c, aclrtStream stream) {
  if (c->what.dtype > HCCL_DATA_TYPE_BFP16)
    c->refused = std::string(kOps[c->what.op]) + ": dtype " + std::to_string(c->what.dtype) + " is not emulated";
  uint64_t bytes = 0;
  const char *begin = nullptr, *end = nullptr;
  for (const Segment& in : c->sends) {
    bytes += in.bytes;
    if (!begin || in.memory < begin) begin = in.memory;
    if (in.memory + in.bytes > end) end = in.memory + in.bytes;
  }
  device::Range reads{begin, static_cast<uint64_t>(end - begin)};
  int64_t subject = c->what.op + 256 * c->what.dtype;
  return emulator_enqueue_collective(stream, number, turn, c, subject, bytes, reads) ? HCCL_E_RUNTIME : HCCL_SUCCESS;
}

Segment part(const void* memory, uint64_t first, uint64_t count, HcclDataType dtype) {
  size_t size = dtype <= HCCL_DATA_TYPE_BFP16 ? kSizes[dtype] : 0;
  return {static_cast<char*>(const_cast<void*>(memory)) + first * size, count * size};
}

HcclResult reduce(Op op, void* from, void* to, uint64_t count, HcclDataType dtype, HcclReduceOp how, HcclComm comm,
                  aclrtStream stream) {
  Collective* c = begin(comm, op, dtype, how, count);
  uint32_t ranks = c->group->ranks;
  uint64_t bytes = part(nullptr, 0, count, dtype).bytes;
  c->folds = true;
  c->sends = {part(from, 0, op == ALL_REDUCE ? count : count * ranks, dtype)};
  for (uint32_t rank = 0; rank < ranks; rank++) {
    c->parts[rank] = {op == ALL_REDUCE ? 0 : rank * bytes, bytes};
    c->receives[rank] = part(to, 0, count, dtype);
  }
  return issue(c, stream);
}

// From the root to all.
HcclResult spread(Op op, void* memory, uint64_t count, HcclDataType dtype, uint32_t root, HcclComm comm,
                  aclrtStream stream) {
  Collective* c = begin(comm, op, dtype, root, count);
  Segment whole = part(memory, 0, count, dtype);
  if (c->group->rank == root) {
    c->sends = {whole};
    for (uint32_t rank = 0; rank < c->group->ranks; rank++)
      if (rank != root) c->parts[rank] = {0, whole.bytes};
  } else if (root < c->group->ranks) {
    c->receives[root] = whole;
  }
  return issue(c, stream);
}

HcclResult between_two(void* memory, uint64_t count, HcclDataType dtype, uint32_t peer, bool sends, HcclComm comm,
                       aclrtStream stream) {
  Group& group = **static_cast<std::shared_ptr<Group>*>(comm);
  if (group.ranks != 2) {  // the wheel makes a group of two for each pair
    refuse("send and recv are emulated in groups of 2: got " + std::to_string(group.ranks));
    return HCCL_E_NOT_SUPPORT;
  }
  return spread(SEND, memory, count, dtype, sends ? group.rank : peer, comm, stream);
}

// --- for peers that wait -----------------------------------------------------------

struct Groups {
  std::mutex lock;
  std::vector<std::weak_ptr<Group>> all;
  bool helped = false;
};
Groups& groups = *new Groups;  // never destroyed: the thread goes on while the process ends

// Whether no peer waits for a collective that was issued here.
int nobody_waits() {
  std::lock_guard<std::mutex> guard(groups.lock);
  for (auto& held : groups.all)
    if (auto group = held.lock()) {
      uint64_t collected = group->own().collected;
      if (collected >= group->issued) continue;
      for (uint32_t rank = 0; rank < group->ranks; rank++)
        if (group->board->places[rank].entered > collected) return 0;
    }
  return 1;
}

void help() {
  for (int waited = 0;; waited++) {  // a host that is merely slow to issue is left alone
    std::this_thread::sleep_for(std::chrono::milliseconds(25));
    if (nobody_waits()) waited = 0;
    else if (waited >= 12) emulator_help(nobody_waits);
  }
}

void keep(const std::shared_ptr<Group>& group) {
  std::lock_guard<std::mutex> guard(groups.lock);
  groups.all.push_back(group);
  if (!groups.helped) std::thread(help).detach();
  groups.helped = true;
}

// --- making a group ------------------------------------------------------------------

std::string fresh_name() {
  std::random_device draw;
  char text[64];
  snprintf(text, sizeof text, "/mla_fx-hccl-%d-%08x%08x", static_cast<int>(getpid()), draw(), draw());
  return text;
}

bool open_board(Group& group, int how) {
  group.file = shm_open(group.name.c_str(), O_RDWR | O_CLOEXEC | how, 0600);
  if (group.file < 0 || ftruncate(group.file, sizeof(Board) + kRegion * kMost) != 0) return false;
  void* memory = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, group.file, 0);
  if (memory == MAP_FAILED) return false;
  group.board = static_cast<Board*>(memory);
  return true;
}

int joined(void* handle) {
  auto& group = *static_cast<Group*>(handle);
  for (uint32_t rank = 0; rank < group.ranks; rank++)
    if (!group.board->places[rank].ranks.load(std::memory_order_acquire)) return 0;
  return 1;
}

// Names of groups that were begun here; a group that never came about would leave its name behind.
std::vector<std::string>& begun() {
  static auto* names = new std::vector<std::string>;
  static int at_exit = atexit([] { for (auto& name : *names) shm_unlink(name.c_str()); });
  (void)at_exit;
  return *names;
}

HcclResult join(const std::string& name, int how, uint32_t ranks, uint32_t rank, HcclComm* comm) {
  auto group = std::make_shared<Group>();
  group->name = name, group->rank = rank, group->ranks = ranks;
  if (ranks > kMost || rank >= ranks) {
    refuse("a group has 1 to " + std::to_string(kMost) + " ranks: got rank " + std::to_string(rank) + " of " +
           std::to_string(ranks));
    return HCCL_E_PARA;
  }
  if (!open_board(*group, how)) {
    refuse("group " + name + ": " + strerror(errno));
    return HCCL_E_OPEN_FILE_FAILURE;
  }
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  if (fcntl(group->file, F_SETLK, &lock) != 0) {
    refuse("group " + name + ": rank " + std::to_string(rank) + " is taken by another process");
    return HCCL_E_PARA;
  }
  group->own().process = getpid();
  group->own().ranks.store(ranks, std::memory_order_release);
  if (!emulator_wait(joined, group.get())) {
    std::string who;
    for (uint32_t other = 0; other < ranks; other++)
      if (!group->board->places[other].ranks) who += (who.empty() ? "" : ", ") + std::to_string(other);
    refuse("group " + name + " of " + std::to_string(ranks) + ": waited too long for rank " + who);
    return HCCL_E_TIMEOUT;
  }
  if (rank == 0) shm_unlink(name.c_str());  // all have it open
  for (uint32_t other = 0; other < ranks; other++)
    if (group->board->places[other].ranks != ranks) {
      refuse("group " + name + ": rank " + std::to_string(other) + " is in one of " +
             std::to_string(group->board->places[other].ranks) + " ranks, rank " + std::to_string(rank) +
             " in one of " + std::to_string(ranks));
      return HCCL_E_PARA;
    }
  keep(group);
  *comm = new std::shared_ptr<Group>(group);
  return HCCL_SUCCESS;
}

}  // namespace

extern "C" {

// --- collectives -----------------------------------------------------------------

HcclResult HcclAllReduce(void* from, void* to, uint64_t count, HcclDataType dtype, HcclReduceOp how, HcclComm comm,
                         aclrtStream stream) {
  return reduce(ALL_REDUCE, from, to, count, dtype, how, comm, stream);
}

HcclResult HcclReduceScatter(void* from, void* to, uint64_t count, HcclDataType dtype, HcclReduceOp how, HcclComm comm,
                             aclrtStream stream) {
  return reduce(REDUCE_SCATTER, from, to, count, dtype, how, comm, stream);
}

HcclResult HcclAllGather(void* from, void* to, uint64_t count, HcclDataType dtype, HcclComm comm, aclrtStream stream) {
  Collective* c = begin(comm, ALL_GATHER, dtype, 0, count);
  c->sends = {part(from, 0, count, dtype)};
  for (uint32_t rank = 0; rank < c->group->ranks; rank++) {
    c->parts[rank] = {0, c->sends[0].bytes};
    c->receives[rank] = part(to, rank * count, count, dtype);
  }
  return issue(c, stream);
}

HcclResult HcclAlltoAll(const void* from, uint64_t count, HcclDataType dtype, const void* to, uint64_t, HcclDataType,
                        HcclComm comm, aclrtStream stream) {
  Collective* c = begin(comm, ALL_TO_ALL, dtype, 0, count);
  uint64_t bytes = part(from, 0, count, dtype).bytes;
  c->sends = {part(from, 0, count * c->group->ranks, dtype)};
  for (uint32_t rank = 0; rank < c->group->ranks; rank++) {
    c->parts[rank] = {rank * bytes, bytes};
    c->receives[rank] = part(to, rank * count, count, dtype);
  }
  return issue(c, stream);
}

HcclResult HcclAlltoAllV(const void* from, const void* counts, const void* firsts, HcclDataType dtype, const void* to,
                         const void* awaited, const void* places, HcclDataType, HcclComm comm, aclrtStream stream) {
  auto at = [](const void* list, uint32_t rank) { return static_cast<const uint64_t*>(list)[rank]; };
  Collective* c = begin(comm, ALL_TO_ALL_V, dtype, 0, 0);
  uint64_t begun = 0;
  for (uint32_t rank = 0; rank < c->group->ranks; rank++) {
    c->sends.push_back(part(from, at(firsts, rank), at(counts, rank), dtype));
    c->parts[rank] = {begun, c->sends[rank].bytes};
    c->receives[rank] = part(to, at(places, rank), at(awaited, rank), dtype);
    begun += c->sends[rank].bytes;
  }
  return issue(c, stream);
}

HcclResult HcclBroadcast(void* memory, uint64_t count, HcclDataType dtype, uint32_t root, HcclComm comm,
                         aclrtStream stream) {
  return spread(BROADCAST, memory, count, dtype, root, comm, stream);
}

HcclResult HcclSend(void* memory, uint64_t count, HcclDataType dtype, uint32_t peer, HcclComm comm,
                    aclrtStream stream) {
  return between_two(memory, count, dtype, peer, true, comm, stream);
}

HcclResult HcclRecv(void* memory, uint64_t count, HcclDataType dtype, uint32_t peer, HcclComm comm,
                    aclrtStream stream) {
  return between_two(memory, count, dtype, peer, false, comm, stream);
}

HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) {
  return issue(begin(comm, BARRIER, HCCL_DATA_TYPE_INT8, 0, 0), stream);
}

// --- groups ------------------------------------------------------------------------

HcclResult HcclGetRootInfo(HcclRootInfo* info) {
  Group group;
  group.name = fresh_name();
  begun().push_back(group.name);
  if (!open_board(group, O_CREAT | O_EXCL)) {
    refuse("group " + group.name + ": " + strerror(errno));
    return HCCL_E_OPEN_FILE_FAILURE;
  }
  strcpy(info->internal, group.name.c_str());
  return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo* info, uint32_t rank, const HcclCommConfig*,
                                      HcclComm* comm) {
  return join(info->internal, 0, ranks, rank, comm);
}

HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo* info, uint32_t rank, HcclComm* comm) {
  return join(info->internal, 0, ranks, rank, comm);
}

// Part of a group, under a number that is the same on all its ranks.
HcclResult HcclCreateSubCommConfig(HcclComm* comm, uint32_t ranks, uint32_t*, uint64_t number, uint32_t rank,
                                   HcclCommConfig*, HcclComm* made) {
  if (rank >= ranks) return HCCL_SUCCESS;  // not one of them
  auto& whole = *static_cast<std::shared_ptr<Group>*>(*comm);
  return join(whole->name + "-" + std::to_string(number), O_CREAT, ranks, rank, made);
}

HcclResult HcclCommDestroy(HcclComm comm) {
  auto* group = static_cast<std::shared_ptr<Group>*>(comm);
  (*group)->own().left = 1;
  delete group;
  return HCCL_SUCCESS;
}

HcclResult HcclGetCommName(HcclComm comm, char* name) {
  strncpy(name, (*static_cast<std::shared_ptr<Group>*>(comm))->name.c_str(), COMM_NAME_MAX_LENGTH);
  return HCCL_SUCCESS;
}

HcclResult HcclGetRankSize(HcclComm comm, uint32_t* ranks) {
  *ranks = (*static_cast<std::shared_ptr<Group>*>(comm))->ranks;
  return HCCL_SUCCESS;
}

HcclResult HcclGetRankId(HcclComm comm, uint32_t* rank) {
  *rank = (*static_cast<std::shared_ptr<Group>*>(comm))->rank;
  return HCCL_SUCCESS;
}

HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }  // it is deterministic as it is

HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* error) {
  *error = HCCL_SUCCESS;  // errors come up where the host waits
  return HCCL_SUCCESS;
}

}  // extern "C"
