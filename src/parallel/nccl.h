// NCCL, for gathers between GPUs without the host. It is loaded when ranks need it, so no program links to it.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "parallel/communicator.h"

namespace kvanta::parallel {

// Functions of nccl.h, as NCCL's ABI has them since 2.11: results are enums, streams and communicators are pointers.
struct NcclUniqueId {
  char internal[128] = {};
};
struct NcclLibrary {
  std::string path;  // of the file that was loaded
  int (*get_version)(int* version) = nullptr;
  int (*get_unique_id)(NcclUniqueId* id) = nullptr;
  int (*comm_init_rank)(void** comm, int ranks, NcclUniqueId id, int rank) = nullptr;
  int (*comm_abort)(void* comm) = nullptr;
  int (*comm_get_async_error)(void* comm, int* error) = nullptr;
  int (*all_gather)(const void* own, void* all, size_t count, int data_type, void* comm, void* stream) = nullptr;
  const char* (*get_error_string)(int result) = nullptr;
};

// `name`: a path, or the name of a library that is loaded already or in the system's folders ("libnccl.so.2"). Throws
// ResourceError with the library, what is wrong with it and how to install it.
std::shared_ptr<const NcclLibrary> LoadNccl(const std::string& name);

// The GPUs of all ranks, one each. Only all-gathers, which copy: the order in which NCCL adds values is its own.
class NcclGroup {
 public:
  // The GPU that `select` makes the calling thread's current one joins those of the other `ranks`, which all do the
  // same. Throws ResourceError, and RankLostError once the loss of a rank is reported.
  NcclGroup(std::shared_ptr<const NcclLibrary> library, Communicator& ranks, const std::function<void()>& select);
  ~NcclGroup();  // after the CUDA graphs that hold its gathers
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  // Every GPU gets the `bytes` at `own` of each rank, in their order, at `all`; own may be this rank's place in it. The
  // gather is on `stream`, a cudaStream_t, and may be captured. Returns what went wrong; "" if nothing.
  std::string AllGather(const void* own, void* all, size_t bytes, void* stream) noexcept;
  // Error of gathers that have begun; "" without one.
  std::string AsyncError() const noexcept;
  // Ends gathers in progress, whose values are undefined then, and takes part in no more. Waits neither for the other
  // ranks nor for this one's graphs. Another thread may be in AllGather, which ends, too.
  void Abort() noexcept;

 private:
  const std::shared_ptr<const NcclLibrary> library_;
  std::atomic<void*> comm_ = nullptr;
  std::jthread aborting_;
};

}  // namespace kvanta::parallel
