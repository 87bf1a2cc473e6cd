// A library with the functions of NCCL that Kvanta calls, for ranks that are threads of one process and memory of the
// host. Built as libraries: whole, too old (FAKE_NCCL_VERSION) and without a function (FAKE_NCCL_WITHOUT_ABORT).
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "parallel/fake_nccl.h"

#ifndef FAKE_NCCL_VERSION
#define FAKE_NCCL_VERSION 22304
#endif
#define FAKE_NCCL_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct UniqueId {
  char internal[128];
};

// The ranks of one id.
struct Group {
  std::mutex mutex;
  std::condition_variable changed;
  int joined = 0, arrived = 0;
  int64_t round = 0;
  bool aborted = false;
  std::vector<uint8_t> data;

  // Waits for all ranks; false once one has aborted.
  bool Meet(int ranks, std::unique_lock<std::mutex>& lock) {
    const int64_t now = round;
    if (++arrived == ranks) {
      arrived = 0;
      ++round;
      changed.notify_all();
    }
    changed.wait(lock, [&] { return round != now || aborted; });
    return round != now;
  }
};

struct Comm {
  std::shared_ptr<Group> group;
  int ranks, rank;
};

std::mutex mutex;
std::map<std::string, std::shared_ptr<Group>> groups;
FakeNcclCalls calls;
std::string failing;
int failure = 0;
int ids = 0;

int Result(const char* function) {
  const std::lock_guard lock(mutex);
  return failing == function ? failure : 0;
}

}  // namespace

FAKE_NCCL_EXPORT void FakeNcclFail(const char* function, int result) {
  const std::lock_guard lock(mutex);
  failing = function;
  failure = result;
}
FAKE_NCCL_EXPORT void FakeNcclTakeCalls(FakeNcclCalls* taken) {
  const std::lock_guard lock(mutex);
  *taken = std::exchange(calls, {});
}

FAKE_NCCL_EXPORT int ncclGetVersion(int* version) {
  *version = FAKE_NCCL_VERSION;
  return 0;
}
FAKE_NCCL_EXPORT const char* ncclGetErrorString(int result) {
  return result == 2 ? "unhandled system error" : result == 6 ? "remote process exited" : "no error";
}
FAKE_NCCL_EXPORT int ncclGetUniqueId(UniqueId* id) {
  if (const int result = Result("ncclGetUniqueId"); result != 0) return result;
  const std::lock_guard lock(mutex);
  for (size_t i = 0; i < sizeof(id->internal); ++i) id->internal[i] = static_cast<char>(i * 7 + 1);  // no byte is spare
  id->internal[0] = static_cast<char>(++ids);
  ++calls.ids;
  return 0;
}
FAKE_NCCL_EXPORT int ncclCommInitRank(void** comm, int ranks, UniqueId id, int rank) {
  if (const int result = Result("ncclCommInitRank"); result != 0) return result;
  std::shared_ptr<Group> group;
  {
    const std::lock_guard lock(mutex);
    std::shared_ptr<Group>& found = groups[std::string(id.internal, sizeof(id.internal))];
    if (found == nullptr) found = std::make_shared<Group>();
    group = found;
    ++calls.inits;
  }
  *comm = new Comm{group, ranks, rank};
  std::unique_lock lock(group->mutex);
  return group->Meet(ranks, lock) ? 0 : 6;
}
FAKE_NCCL_EXPORT int ncclCommGetAsyncError(void* /*comm*/, int* error) {
  *error = Result("a gather");
  return Result("ncclCommGetAsyncError");
}
FAKE_NCCL_EXPORT int ncclAllGather(const void* own, void* all, size_t count, int data_type, void* comm, void* stream) {
  if (const int result = Result("ncclAllGather"); result != 0) return result;
  const Comm& of = *static_cast<const Comm*>(comm);
  {
    const std::lock_guard lock(mutex);
    ++calls.gathers;
    calls.bytes += static_cast<int64_t>(count);
    calls.in_place += own == static_cast<uint8_t*>(all) + static_cast<size_t>(of.rank) * count ? 1 : 0;
    calls.data_type = data_type;
    calls.stream = stream;
  }
  Group& group = *of.group;
  const size_t bytes = count * static_cast<size_t>(of.ranks);
  std::unique_lock lock(group.mutex);
  if (group.data.size() < bytes) group.data.resize(bytes);
  std::memcpy(group.data.data() + static_cast<size_t>(of.rank) * count, own, count);
  if (!group.Meet(of.ranks, lock)) return 6;
  std::memcpy(all, group.data.data(), bytes);
  return group.Meet(of.ranks, lock) ? 0 : 6;
}
#ifndef FAKE_NCCL_WITHOUT_ABORT
FAKE_NCCL_EXPORT int ncclCommAbort(void* comm) {
  {
    const std::lock_guard lock(mutex);
    ++calls.aborts;
  }
  auto* const of = static_cast<Comm*>(comm);
  {
    const std::lock_guard lock(of->group->mutex);
    of->group->aborted = true;
    of->group->changed.notify_all();
  }
  delete of;
  return 0;
}
#endif
