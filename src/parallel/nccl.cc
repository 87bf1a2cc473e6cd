#include "parallel/nccl.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/quote.h"
#include "kvanta/error.h"

namespace kvanta::parallel {
namespace {

constexpr int kSuccess = 0, kInProgress = 7;  // ncclResult_t
constexpr int kUint8 = 1;                     // ncclDataType_t
constexpr int kMinVersion = 21100;            // mixes gathers of CUDA graphs with others
constexpr const char* kInstall =
    "install Debian's libnccl2, or nvidia-nccl-cu12 or nvidia-nccl-cu13 next to this Python package";

template <class Function>
void Find(void* handle, const std::string& path, const char* name, Function& function) {
  void* const found = dlsym(handle, name);
  if (found == nullptr) throw ResourceError(fmt::format("NCCL, {}: it lacks {}; {}", Quote(path), name, kInstall));
  function = reinterpret_cast<Function>(found);
}

std::string PathOf(const void* symbol, const std::string& otherwise) {
  Dl_info info{};
  return dladdr(symbol, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : otherwise;
}

std::string Describe(const NcclLibrary& library, const char* action, int result) noexcept {
  const char* const text = library.get_error_string(result);
  return fmt::format("NCCL, {}: {} failed: {}", Quote(library.path), action, text == nullptr ? "unknown error" : text);
}

void Require(const NcclLibrary& library, const char* action, int result) {
  if (result != kSuccess) throw ResourceError(Describe(library, action, result));
}

constexpr std::chrono::milliseconds kReportPoll(100);

// A call of ncclCommInitRank by a thread of its own.
class Joining {
 public:
  void Run(const NcclLibrary& library, const std::function<void()>& select, NcclUniqueId id, int ranks, int rank) {
    void* comm = nullptr;
    int result = kSuccess;
    std::exception_ptr error;
    try {
      select();
      result = library.comm_init_rank(&comm, ranks, id, rank);
    } catch (const std::exception&) {
      error = std::current_exception();
    }
    const std::lock_guard lock(mutex_);
    comm_ = comm;
    result_ = result;
    error_ = error;
    is_done_ = true;
    if (is_abandoned_ && comm_ != nullptr) library.comm_abort(comm_);
    done_.notify_all();
  }
  // True once it has returned.
  bool WaitFor(std::chrono::milliseconds time) {
    std::unique_lock lock(mutex_);
    return done_.wait_for(lock, time, [&] { return is_done_; });
  }
  // The communicator, after it has returned.
  void* Take(const NcclLibrary& library) const {
    if (error_) std::rethrow_exception(error_);
    Require(library, "ncclCommInitRank", result_);
    return comm_;
  }
  void Abandon(const NcclLibrary& library) {
    const std::lock_guard lock(mutex_);
    is_abandoned_ = true;
    if (is_done_ && comm_ != nullptr) library.comm_abort(comm_);
  }

 private:
  std::mutex mutex_;
  std::condition_variable done_;
  bool is_done_ = false, is_abandoned_ = false;
  void* comm_ = nullptr;
  int result_ = kSuccess;
  std::exception_ptr error_;
};

}  // namespace

std::shared_ptr<const NcclLibrary> LoadNccl(const std::string& name) {
  void* const handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);  // never closed: its threads may go on
  if (handle == nullptr) {
    const char* const reason = dlerror();
    throw ResourceError(fmt::format("NCCL cannot be loaded: {}; {}", reason == nullptr ? name : reason, kInstall));
  }
  auto library = std::make_shared<NcclLibrary>();
  Find(handle, name, "ncclGetVersion", library->get_version);
  library->path = PathOf(reinterpret_cast<const void*>(library->get_version), name);
  Find(handle, library->path, "ncclGetErrorString", library->get_error_string);
  int version = 0;
  Require(*library, "ncclGetVersion", library->get_version(&version));
  if (version < kMinVersion) {
    throw ResourceError(fmt::format("NCCL, {}: its version code is {}; 2.11 ({}) or later is required; {}",
                                    Quote(library->path), version, kMinVersion, kInstall));
  }
  Find(handle, library->path, "ncclGetUniqueId", library->get_unique_id);
  Find(handle, library->path, "ncclCommInitRank", library->comm_init_rank);
  Find(handle, library->path, "ncclCommAbort", library->comm_abort);
  Find(handle, library->path, "ncclCommGetAsyncError", library->comm_get_async_error);
  Find(handle, library->path, "ncclAllGather", library->all_gather);
  return library;
}

NcclGroup::NcclGroup(std::shared_ptr<const NcclLibrary> library, Communicator& ranks,
                     const std::function<void()>& select)
    : library_(std::move(library)) {
  std::vector<uint8_t> message;
  NcclUniqueId id;
  if (ranks.Rank() == 0) {
    Require(*library_, "ncclGetUniqueId", library_->get_unique_id(&id));
    message.assign(sizeof(id), 0);
    std::memcpy(message.data(), &id, sizeof(id));
  }
  ranks.Broadcast(message);
  if (message.size() != sizeof(id)) {
    throw ResourceError(fmt::format("rank 0 sent {} bytes instead of NCCL's id of {}", message.size(), sizeof(id)));
  }
  std::memcpy(&id, message.data(), sizeof(id));
  // NCCL waits for the other ranks without a limit: on a thread, which is left behind when one is lost.
  const auto joining = std::make_shared<Joining>();
  std::thread([library = library_, joining, select, id, size = ranks.Size(), rank = ranks.Rank()] {
    joining->Run(*library, select, id, size, rank);
  }).detach();
  try {
    while (!joining->WaitFor(kReportPoll)) ranks.CheckReports();
  } catch (const std::exception&) {
    joining->Abandon(*library_);
    throw;
  }
  comm_ = joining->Take(*library_);
}

std::string NcclGroup::AllGather(const void* own, void* all, size_t bytes, void* stream) noexcept {
  void* const comm = comm_;
  if (comm == nullptr) return "NCCL: the group has been ended";
  const int result = library_->all_gather(own, all, bytes, kUint8, comm, stream);
  return result == kSuccess ? "" : Describe(*library_, "ncclAllGather", result);
}

std::string NcclGroup::AsyncError() const noexcept {
  int error = kSuccess;
  void* const comm = comm_;
  if (comm == nullptr) return "";
  const int result = library_->comm_get_async_error(comm, &error);
  if (result != kSuccess) return Describe(*library_, "ncclCommGetAsyncError", result);
  return error == kSuccess || error == kInProgress ? "" : Describe(*library_, "a gather", error);
}

// Not ncclCommDestroy, which waits for the other ranks.
NcclGroup::~NcclGroup() {
  if (void* const comm = comm_; comm != nullptr) library_->comm_abort(comm);
}

// NCCL first makes its kernels end, and then waits until no graph holds gathers: on a thread, for their owner is the
// caller.
void NcclGroup::Abort() noexcept {
  void* const comm = comm_.exchange(nullptr);
  if (comm == nullptr) return;
  try {
    aborting_ = std::jthread([library = library_, comm] { library->comm_abort(comm); });
  } catch (const std::exception&) {  // no thread: the process can only end
  }
}

}  // namespace kvanta::parallel
