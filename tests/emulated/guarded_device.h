// A GPU's memory that is emulated: the host's, but closed to everybody while no kernel and no copy runs. A host that
// follows a pointer of the GPU's then dies at once, as it would with a GPU.
#pragma once

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

  // While one lives, the memory may be touched. They nest.
  class Opened {
   public:
    explicit Opened(GuardedDevice& device) : device_(device) { device_.Open(); }
    ~Opened() { device_.Close(); }
    Opened(const Opened&) = delete;
    Opened& operator=(const Opened&) = delete;

   private:
    GuardedDevice& device_;
  };

  std::string_view Name() const noexcept override { return "cuda:emulated"; }
  Buffer Allocate(size_t bytes) override;
  std::unique_ptr<Reservation> Reserve(size_t bytes) override;
  void CopyIn(void* device, const void* host, size_t bytes) override;
  void CopyOut(void* host, const void* device, size_t bytes) override;
  void CopyOutAsync(void* host, const void* device, size_t bytes) override;
  // Throws EmulationError with what a launch failed with, as a GPU's does.
  void Wait() override {
    RefuseRecorded("waiting");
    waits_ += pending_ ? 1 : 0;
    pending_ = false;
    if (!error_.empty()) throw emulated::EmulationError(error_);
  }
  void Fill(void* device, uint8_t byte, size_t bytes) override;
  int64_t AvailableBytes() const override { return Cpu().AvailableBytes(); }

  // What is begun from now on is kept there, not done; null: it is done. What cannot be kept fails.
  using Recording = std::vector<std::function<void()>>;
  void RecordTo(Recording* recording) noexcept { recording_ = recording; }
  Recording* CapturedGraph() const noexcept { return recording_; }
  void Replay(const Recording& recording);
  int64_t Replays() const noexcept { return replays_; }

  // A launch failed; nothing: none did.
  void Fail(std::string error) { error_ = std::move(error); }
  const std::string& Error() const noexcept { return error_; }

  // Times that the host has waited for something that was begun.
  int64_t Waits() const noexcept { return waits_; }

 private:
  struct Arena;
  void Open() noexcept;
  void Close() noexcept;
  void RefuseRecorded(const char* what) {
    if (recording_ != nullptr) Fail(std::string(what) + " while launches are recorded");
  }

  std::shared_ptr<Arena> arena_;
  Recording* recording_ = nullptr;
  int64_t replays_ = 0;
  int open_ = 0;
  bool pending_ = false;
  int64_t waits_ = 0;
  std::string error_;
};

}  // namespace kvanta::testing
