// The machine's best GPU: its memory, one stream, and launches on it.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/entries.h"
#include "kernels/cuda/gpu.h"
#include "kernels/cuda/probe.h"
#include "kvanta/error.h"

namespace kvanta::kernels {
namespace {

// Throws with what was tried; the runtime forgets the error.
void Require(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw ResourceError(what + ": " + cudaGetErrorString(error));
}

// Page-locked memory through which everything goes to the GPU: a copy from it is asynchronous and at the bus's full
// speed. Two halves: one is filled while the other's copies may still run.
class Staging {
 public:
  explicit Staging(cudaStream_t stream) : stream_(stream) {
    Require(cudaMallocHost(&memory_, 2 * kHalf), "allocating page-locked memory");
    for (cudaEvent_t& event : copied_) {
      Require(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
    }
  }
  ~Staging() {
    for (cudaEvent_t event : copied_) cudaEventDestroy(event);
    cudaFreeHost(memory_);
  }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  void Copy(void* device, const void* host, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
      if (used_ == kHalf) Turn();
      const size_t piece = std::min(bytes - done, kHalf - used_);
      auto* staged = static_cast<uint8_t*>(memory_) + half_ * kHalf + used_;
      std::memcpy(staged, static_cast<const uint8_t*>(host) + done, piece);
      Require(cudaMemcpyAsync(static_cast<uint8_t*>(device) + done, staged, piece, cudaMemcpyHostToDevice, stream_),
              "copying to the GPU");
      done += piece;
      used_ = std::min(kHalf, (used_ + piece + kAlignment - 1) / kAlignment * kAlignment);
    }
  }

 private:
  static constexpr size_t kHalf = size_t{4} << 20;
  static constexpr size_t kAlignment = 64;

  void Turn() {
    Require(cudaEventRecord(copied_[half_], stream_), "recording an event");
    half_ = 1 - half_;
    used_ = 0;
    Require(cudaEventSynchronize(copied_[half_]), "waiting for a copy");
  }

  cudaStream_t stream_;
  void* memory_ = nullptr;
  cudaEvent_t copied_[2] = {};
  size_t half_ = 0;
  size_t used_ = 0;
};

class CudaDevice final : public Device {
 public:
  CudaDevice(int device, cudaStream_t stream)
      : device_(device), stream_(stream), name_("cuda:" + std::to_string(device)), staging_(stream) {}

  std::string_view Name() const noexcept override { return name_; }

  Buffer Allocate(size_t bytes) override {
    void* data = nullptr;
    Require(cudaSetDevice(device_), "choosing the GPU");
    Require(cudaMalloc(&data, std::max<size_t>(bytes, 1)),
            "allocating " + std::to_string(bytes) + " bytes of GPU memory");
    std::shared_ptr<void> owned(data, [](void* memory) { cudaFree(memory); });
    Require(cudaMemsetAsync(data, 0, bytes, stream_), "clearing GPU memory");
    return {std::move(owned), bytes};
  }
  std::unique_ptr<Reservation> Reserve(size_t bytes) override { return ReserveCudaMemory(bytes, device_, stream_); }
  Buffer AllocateHost(size_t bytes) override {
    void* data = nullptr;
    Require(cudaMallocHost(&data, std::max<size_t>(bytes, 1)),
            "allocating " + std::to_string(bytes) + " bytes of page-locked memory");
    std::shared_ptr<void> owned(data, [](void* memory) { cudaFreeHost(memory); });
    std::memset(data, 0, bytes);
    return {std::move(owned), bytes};
  }
  void CopyIn(void* device, const void* host, size_t bytes) override { staging_.Copy(device, host, bytes); }
  void CopyOut(void* host, const void* device, size_t bytes) override {
    CopyOutLater(host, device, bytes);
    Wait();
  }
  void CopyOutLater(void* host, const void* device, size_t bytes) override {
    Require(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream_), "copying from the GPU");
  }
  void Wait() override { Require(cudaStreamSynchronize(stream_), "waiting for the GPU"); }
  void Fill(void* device, uint8_t byte, size_t bytes) override {
    Require(cudaMemsetAsync(device, byte, bytes, stream_), "filling GPU memory");
  }
  int64_t AvailableBytes() const override {
    size_t available = 0;
    size_t total = 0;
    Require(cudaSetDevice(device_), "choosing the GPU");
    Require(cudaMemGetInfo(&available, &total), "asking for the GPU's memory");
    return static_cast<int64_t>(available);
  }

 private:
  int device_;
  cudaStream_t stream_;
  std::string name_;
  Staging staging_;
};

class CudaGpu final : public Gpu {
 public:
  explicit CudaGpu(const CudaProbe& probe) : name_("cuda-" + CudaUnit()), index_(probe.best) {
    Require(cudaSetDevice(probe.best), "choosing the GPU");
    Require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
    cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, probe.best);
    device_ = std::make_unique<CudaDevice>(probe.best, stream_);
  }
  ~CudaGpu() override {
    cudaStreamSynchronize(stream_);
    for (cudaEvent_t event : clock_) {
      if (event != nullptr) cudaEventDestroy(event);
    }
    device_.reset();
    cudaStreamDestroy(stream_);
  }
  CudaGpu(const CudaGpu&) = delete;
  CudaGpu& operator=(const CudaGpu&) = delete;

  std::string Name() const override { return name_; }
  Device& device() noexcept override { return *device_; }
  int Multiprocessors() const noexcept override { return multiprocessors_; }

  void Append(int kernel, const cuda::AppendSide& side) noexcept override {
    Use();
    cuda::LaunchAppend(kernel, side, stream_);
    Keep(cudaPeekAtLastError(), "an append kernel");
  }
  void Attend(int kernel, const cuda::AttendLayer& layer) noexcept override {
    Use();
    constexpr int kBlocksOfOne = 4;  // of a multiprocessor; more than fit wait their turn
    cuda::LaunchAttend(kernel, layer, kBlocksOfOne * multiprocessors_, stream_);
    Keep(cudaPeekAtLastError(), "an attention kernel");
    cuda::LaunchMerge(layer, stream_);
    Keep(cudaPeekAtLastError(), "a merge kernel");
  }
  void Run(const cuda::ModelWork& work) noexcept override {
    Use();
    cuda::LaunchModel(work, stream_);
    Keep(cudaPeekAtLastError(), "a kernel of the model");
  }
  void Copy(void* to, const void* from, size_t bytes) noexcept override {
    Keep(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_), "a copy");
  }
  double Seconds(const std::function<void()>& launches) override {
    Use();
    for (cudaEvent_t& event : clock_) {
      if (event == nullptr) Require(cudaEventCreate(&event), "making an event");
    }
    Require(cudaEventRecord(clock_[0], stream_), "recording an event");
    launches();
    Require(cudaEventRecord(clock_[1], stream_), "recording an event");
    Require(cudaEventSynchronize(clock_[1]), "waiting for the GPU");
    float milliseconds = 0;
    Require(cudaEventElapsedTime(&milliseconds, clock_[0], clock_[1]), "reading the GPU's clock");
    return milliseconds * 1e-3;
  }
  void Check() override {
    Keep(cudaStreamSynchronize(stream_), "a kernel");
    if (error_ == cudaSuccess) return;
    throw ResourceError(std::string(where_) + " failed on " + name_ + ": " + cudaGetErrorString(error_));
  }

 private:
  // Each thread has a current device of its own, the first one until it says otherwise; a launch must be on the
  // stream's.
  void Use() noexcept { Keep(cudaSetDevice(index_), "choosing the GPU"); }
  void Keep(cudaError_t error, const char* where) noexcept {
    if (error == cudaSuccess || error_ != cudaSuccess) return;
    error_ = error;
    where_ = where;
  }

  std::string name_;
  int index_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t clock_[2] = {};
  int multiprocessors_ = 1;
  std::unique_ptr<CudaDevice> device_;
  cudaError_t error_ = cudaSuccess;  // the first
  const char* where_ = "";
};

}  // namespace

std::shared_ptr<Gpu> MakeCudaGpu() {
  if (const std::string missing = MissingForCuda(); !missing.empty()) throw ResourceError(missing);
  static std::mutex mutex;
  static std::weak_ptr<Gpu> made;
  const std::lock_guard lock(mutex);
  std::shared_ptr<Gpu> gpu = made.lock();
  if (gpu == nullptr) made = gpu = std::make_shared<CudaGpu>(ProbeCuda());
  return gpu;
}

}  // namespace kvanta::kernels
