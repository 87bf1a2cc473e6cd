// Emulated device memory: host memory that is inaccessible unless a kernel or copy is running, so that host code that
// dereferences a device pointer crashes, as with a GPU.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/device.h"
#include "emulated/cuda_grid.h"

namespace kvanta::testing {

class GuardedDevice final : public Device {
 public:
  GuardedDevice();

  // Makes the memory accessible during its lifetime; nests.
  class Access {
   public:
    explicit Access(GuardedDevice& device) : device_(device) { device_.Open(); }
    ~Access() { device_.Close(); }
    Access(const Access&) = delete;
    Access& operator=(const Access&) = delete;

   private:
    GuardedDevice& device_;
  };

  std::string_view Name() const noexcept override { return "cuda:emulated"; }
  Buffer Allocate(size_t bytes) override;
  std::unique_ptr<Reservation> Reserve(size_t bytes) override;
  // Page-locked memory, for Device::CopyInAsync.
  Buffer AllocateHost(size_t bytes) override;
  void CopyIn(void* device, const void* host, size_t bytes) override;
  // Copies when something else runs, as a GPU does at the latest.
  void CopyInAsync(void* device, const void* host, size_t bytes) override;
  void CopyOut(void* host, const void* device, size_t bytes) override;
  void CopyOutAsync(void* host, const void* device, size_t bytes) override;
  // Throws EmulationError with the first failed launch's error.
  void Synchronize() override {
    CheckNotCapturing("synchronization");
    if (wait_check_) wait_check_(waited_);
    CopyPending();
    synchronizations_ += pending_ ? 1 : 0;
    pending_ = false;
    if (!error_.empty()) throw emulated::EmulationError(error_);
  }
  void Fill(void* device, uint8_t byte, size_t bytes) override;
  int64_t AvailableBytes() const override { return Cpu().AvailableBytes(); }

  // Captures launches and copies in `graph` instead of running them, until called with null. Actions that cannot be
  // captured fail.
  using Graph = std::vector<std::function<void()>>;
  void CaptureTo(Graph* graph) noexcept { capture_ = graph; }
  Graph* Capture() const noexcept { return capture_; }
  void Replay(const Graph& graph);
  int64_t Replays() const noexcept { return replays_; }

  // kernels::CudaContext::SetWaitCheck, and the time that each synchronization has waited when it calls it.
  using WaitCheck = std::function<void(std::chrono::duration<double>)>;
  void SetWaitCheck(WaitCheck check) { wait_check_ = std::move(check); }
  void SetWaited(std::chrono::duration<double> waited) { waited_ = waited; }

  // Launches of kernels, those of replays among them.
  void CountLaunch() noexcept { ++launches_; }
  int64_t Launches() const noexcept { return launches_; }

  // Sets the error of a failed launch; "" clears it.
  void Fail(std::string error) { error_ = std::move(error); }
  const std::string& Error() const noexcept { return error_; }

  // Number of synchronizations with pending work.
  int64_t Synchronizations() const noexcept { return synchronizations_; }
  // Bytes of CopyInAsync, and those of them that came from page-locked memory.
  int64_t AsyncBytes() const noexcept { return async_bytes_; }
  int64_t PageLockedBytes() const noexcept { return page_locked_bytes_; }

 private:
  struct Arena;
  struct Copy {
    void* device;
    const void* host;
    size_t bytes;
  };
  void CopyPending();
  void Open() noexcept;
  void Close() noexcept;
  void CheckNotCapturing(const char* action) {
    if (capture_ != nullptr) Fail(std::string(action) + " during graph capture");
  }

  std::shared_ptr<Arena> arena_;
  std::vector<Copy> copies_;                                    // CopyInAsync calls still to do
  std::vector<std::pair<const uint8_t*, size_t>> page_locked_;  // ranges that were allocated
  int64_t async_bytes_ = 0, page_locked_bytes_ = 0;
  Graph* capture_ = nullptr;
  WaitCheck wait_check_;
  std::chrono::duration<double> waited_{0};
  int64_t replays_ = 0, launches_ = 0;
  int open_count_ = 0;
  bool pending_ = false;
  int64_t synchronizations_ = 0;
  std::string error_;
};

}  // namespace kvanta::testing
