// CudaContext over the CUDA runtime: device memory, one stream, launches on it.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base/math.h"
#include "kernels/cuda/cuda_context.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/cuda_objects.h"
#include "kernels/cuda/entries.h"
#include "kernels/cuda/probe.h"
#include "kvanta/error.h"

namespace kvanta::kernels {
namespace {

// Stream of this thread's launches during capture; other threads continue to use the context's stream.
thread_local cudaStream_t capturing = nullptr;

void CheckNotCapturing(const char* action) {
  if (capturing != nullptr) throw Error(std::string(action) + " cannot be captured in a CUDA graph");
}

// The first launch error, thrown by every later synchronization: device memory is undefined after it.
class FirstError {
 public:
  void Record(cudaError_t error, const char* action) noexcept {
    if (error != cudaSuccess) Record(cudaGetErrorString(error), action);
  }
  void Record(const std::string& error, const char* action) noexcept {
    const std::lock_guard lock(mutex_);
    if (!error_.empty()) return;
    error_ = error;
    action_ = action;
  }
  void Throw(const std::string& gpu) {
    const std::lock_guard lock(mutex_);
    if (!error_.empty()) throw ResourceError(std::string(action_) + " failed on " + gpu + ": " + error_);
  }

 private:
  std::mutex mutex_;
  std::string error_;
  const char* action_ = "";
};

// Waits for the host's thread; with a check, which may give up.
class HostWait {
 public:
  void SetCheck(CudaContext::WaitCheck check) { check_ = std::move(check); }
  bool HasCheck() const { return check_ != nullptr; }

  // is_done: the runtime's query of a stream or an event; wait: its wait for it.
  template <class Query, class Wait>
  cudaError_t For(Query is_done, Wait wait) const {
    if (!check_) return wait();
    const auto start = std::chrono::steady_clock::now();
    for (;;) {
      const cudaError_t error = is_done();
      if (error != cudaErrorNotReady) return error;
      cudaGetLastError();  // or the next launch would seem to have failed
      check_(std::chrono::steady_clock::now() - start);
    }
  }
  cudaError_t For(cudaStream_t stream) const {
    return For([&] { return cudaStreamQuery(stream); }, [&] { return cudaStreamSynchronize(stream); });
  }
  cudaError_t For(cudaEvent_t event) const {
    return For([&] { return cudaEventQuery(event); }, [&] { return cudaEventSynchronize(event); });
  }

 private:
  CudaContext::WaitCheck check_;
};

// Double-buffered page-locked memory for copies to the GPU, which are then asynchronous and at full bus bandwidth.
// Shared by a process's engines.
class Staging {
 public:
  Staging(cudaStream_t stream, const HostWait& wait)
      : stream_(stream), wait_(wait), memory_(MakeHostMemory(2 * kHalfBytes)) {
    for (Event& event : copied_) event = MakeEvent(cudaEventDisableTiming);
  }

  void Copy(void* device, const void* host, size_t bytes) {
    const std::lock_guard lock(mutex_);
    for (size_t done = 0; done < bytes;) {
      if (used_ == kHalfBytes) SwapHalf();
      const size_t piece = std::min(bytes - done, kHalfBytes - used_);
      auto* staged = static_cast<uint8_t*>(memory_.get()) + half_ * kHalfBytes + used_;
      std::memcpy(staged, static_cast<const uint8_t*>(host) + done, piece);
      Require(cudaMemcpyAsync(static_cast<uint8_t*>(device) + done, staged, piece, cudaMemcpyHostToDevice, stream_),
              "copying to the GPU");
      done += piece;
      used_ = std::min(kHalfBytes, used_ + static_cast<size_t>(RoundUp(static_cast<int64_t>(piece), kAlignment)));
    }
  }

 private:
  static constexpr size_t kHalfBytes = size_t{4} << 20;
  static constexpr int64_t kAlignment = 64;

  void SwapHalf() {
    Require(cudaEventRecord(copied_[half_].get(), stream_), "recording an event");
    half_ = 1 - half_;
    used_ = 0;
    Require(wait_.For(copied_[half_].get()), "waiting for a copy");
  }

  cudaStream_t stream_;
  const HostWait& wait_;
  HostMemory memory_;
  Event copied_[2];
  std::mutex mutex_;
  size_t half_ = 0;
  size_t used_ = 0;
};

// The current device is per thread, so every call sets it.
class CudaDevice final : public Device {
 public:
  CudaDevice(int device, cudaStream_t stream, FirstError& first_error, const HostWait& wait)
      : device_(device),
        stream_(stream),
        first_error_(first_error),
        wait_(wait),
        name_("cuda:" + std::to_string(device)),
        staging_(stream, wait) {}

  std::string_view Name() const noexcept override { return name_; }

  Buffer Allocate(size_t bytes) override {
    void* data = nullptr;
    CheckNotCapturing("an allocation");
    Use();
    Require(cudaMalloc(&data, std::max<size_t>(bytes, 1)),
            "allocating " + std::to_string(bytes) + " bytes of GPU memory");
    // cudaFree synchronizes: no running kernel can still read the memory.
    std::shared_ptr<void> owned(data, [](void* memory) { cudaFree(memory); });
    Require(cudaMemsetAsync(data, 0, bytes, stream_), "clearing GPU memory");
    return {std::move(owned), bytes};
  }
  std::unique_ptr<Reservation> Reserve(size_t bytes) override { return ReserveCudaMemory(bytes, device_, stream_); }
  Buffer AllocateHost(size_t bytes) override {
    Use();
    std::shared_ptr<void> owned = MakeHostMemory(bytes);
    std::memset(owned.get(), 0, bytes);
    return {std::move(owned), bytes};
  }
  void CopyIn(void* device, const void* host, size_t bytes) override {
    CheckNotCapturing("a copy from the host");
    Use();
    staging_.Copy(device, host, bytes);
  }
  void CopyInAsync(void* device, const void* host, size_t bytes) override {
    CheckNotCapturing("a copy from the host");
    Use();
    Require(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream_), "copying to the GPU");
  }
  void CopyOut(void* host, const void* device, size_t bytes) override {
    if (wait_.HasCheck()) Synchronize();  // a copy to memory that is not page-locked waits for the stream, unchecked
    CopyOutAsync(host, device, bytes);
    Synchronize();
  }
  void CopyOutAsync(void* host, const void* device, size_t bytes) override {
    Use();
    Require(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, capturing != nullptr ? capturing : stream_),
            "copying from the GPU");
  }
  void Synchronize() override {
    CheckNotCapturing("synchronization");
    Use();
    first_error_.Record(wait_.For(stream_), "a kernel");
    first_error_.Throw(name_);
  }
  void Fill(void* device, uint8_t byte, size_t bytes) override {
    CheckNotCapturing("a fill");
    Use();
    Require(cudaMemsetAsync(device, byte, bytes, stream_), "filling GPU memory");
  }
  int64_t AvailableBytes() const override {
    size_t available = 0;
    size_t total = 0;
    Use();
    Require(cudaMemGetInfo(&available, &total), "querying the GPU's free memory");
    return static_cast<int64_t>(available);
  }

 private:
  void Use() const { Require(cudaSetDevice(device_), "selecting the GPU"); }

  int device_;
  cudaStream_t stream_;
  FirstError& first_error_;
  const HostWait& wait_;
  std::string name_;
  Staging staging_;
};

class CudaRuntimeContext final : public CudaContext {
 public:
  explicit CudaRuntimeContext(const CudaProbe& probe)
      : name_(std::string("cuda-") + UnitOf(probe)), index_(probe.device) {
    Select();
    Require(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, index_),
            "querying the GPU's multiprocessors");
    stream_ = MakeStream();
    device_ = std::make_unique<CudaDevice>(index_, stream_.get(), first_error_, wait_);
  }
  ~CudaRuntimeContext() override { cudaStreamSynchronize(stream_.get()); }
  CudaRuntimeContext(const CudaRuntimeContext&) = delete;
  CudaRuntimeContext& operator=(const CudaRuntimeContext&) = delete;

  std::string Name() const override { return name_; }
  Device& device() noexcept override { return *device_; }
  int Multiprocessors() const noexcept override { return multiprocessors_; }

  int64_t AttentionBlocks(int kernel, const cuda::AttentionParams& params) noexcept override {
    Use();
    return cuda::AttendShape(kernel, params, multiprocessors_).blocks;
  }
  int64_t GroupBlocks(int kernel, const cuda::AttentionParams& params) noexcept override {
    Use();
    return cuda::GroupShape(kernel, params, multiprocessors_).blocks;
  }

  void Append(int kernel, const cuda::AppendSides& sides) noexcept override {
    Use();
    constexpr int kBlocksPerSm = 8;
    cuda::AppendSides limited = sides;
    limited.max_blocks = kBlocksPerSm * multiprocessors_;
    cuda::LaunchAppend(kernel, limited, Current());
    CheckLaunch("an append kernel");
  }
  void Attend(int kernel, const cuda::AttentionParams& params) noexcept override {
    Use();
    if (params.group_metadata != nullptr) {
      cuda::LaunchGroups(kernel, params, multiprocessors_, Current());
      CheckLaunch("an attention kernel of tile groups");
    }
    if (params.has_tiles) {
      cuda::LaunchAttend(kernel, params, multiprocessors_, Current());
      CheckLaunch("an attention kernel");
    }
    if (params.CombinesTiles()) return;
    cuda::LaunchCombine(params, Current());
    CheckLaunch("a combine kernel");
  }
  void Run(const cuda::ModelOp& op) noexcept override {
    Use();
    cuda::LaunchOp(op, Current());
    CheckLaunch("a model kernel");
  }
  void Copy(void* to, const void* from, size_t bytes) noexcept override {
    Use();
    Record(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, Current()), "a copy");
  }
  std::string NcclLibrary() const override { return "libnccl.so.2"; }
  void Select() override { Require(cudaSetDevice(index_), "selecting the GPU"); }
  void AllGather(parallel::NcclGroup& ranks, const void* own, void* all, size_t bytes) noexcept override {
    Use();
    const std::string error = ranks.AllGather(own, all, bytes, Current());
    if (!error.empty()) first_error_.Record(error, "a gather of all ranks");
  }
  void SetWaitCheck(WaitCheck check) override { wait_.SetCheck(std::move(check)); }
  std::unique_ptr<LaunchGraph> Capture(const std::function<void()>& launches) override {
    Select();
    const Stream stream = MakeStream();
    // Thread-local mode: other threads may allocate meanwhile.
    Require(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "starting stream capture");
    cudaGraph_t captured = nullptr;
    cudaError_t error = cudaSuccess;
    try {
      capturing = stream.get();
      launches();
      capturing = nullptr;
      error = cudaStreamEndCapture(stream.get(), &captured);
    } catch (...) {
      capturing = nullptr;
      cudaStreamEndCapture(stream.get(), &captured);
      const Graph dropped(captured);
      throw;
    }
    const Graph graph(captured);
    Require(error, "capturing a CUDA graph (enforce_eager avoids it)");
    cudaGraphExec_t instance = nullptr;
    Require(cudaGraphInstantiate(&instance, graph.get(), 0), "instantiating a CUDA graph (enforce_eager avoids it)");
    return std::make_unique<CudaGraph>(*this, GraphExec(instance));
  }
  double Seconds(const std::function<void()>& before, const std::function<void()>& launches) override {
    Use();
    const Event begin = MakeEvent(cudaEventDefault);
    const Event end = MakeEvent(cudaEventDefault);
    before();
    Require(cudaEventRecord(begin.get(), stream_.get()), "recording an event");
    launches();
    Require(cudaEventRecord(end.get(), stream_.get()), "recording an event");
    Require(cudaEventSynchronize(end.get()), "waiting for the GPU");
    float milliseconds = 0;
    Require(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()), "reading an event timer");
    return milliseconds * 1e-3;
  }

 private:
  class CudaGraph final : public LaunchGraph {
   public:
    CudaGraph(CudaRuntimeContext& context, GraphExec graph) : context_(context), graph_(std::move(graph)) {}
    void Run() noexcept override {
      context_.Use();
      context_.Record(cudaGraphLaunch(graph_.get(), context_.stream_.get()), "a CUDA graph");
    }

   private:
    CudaRuntimeContext& context_;
    GraphExec graph_;
  };

  cudaStream_t Current() const noexcept { return capturing != nullptr ? capturing : stream_.get(); }
  void Use() noexcept { Record(cudaSetDevice(index_), "selecting the GPU"); }
  void CheckLaunch(const char* kernel) noexcept { Record(cudaPeekAtLastError(), kernel); }
  void Record(cudaError_t error, const char* action) noexcept { first_error_.Record(error, action); }

  std::string name_;
  int index_;
  int multiprocessors_ = 1;
  FirstError first_error_;
  HostWait wait_;
  Stream stream_;
  std::unique_ptr<CudaDevice> device_;  // destroyed before the stream
};

}  // namespace

bool cuda::OverlapsLaunches() noexcept {
  // A process has one GPU, which is the current one.
  static const bool overlaps = [] {
    int device = -1;
    cudaGetDevice(&device);
    return ProbeCuda(device).capability >= 90;
  }();
  return overlaps;
}

std::shared_ptr<CudaContext> MakeCudaContext(int index) {
  const std::string missing = index == kBestGpu ? MissingForCuda() : MissingForCuda(index + 1);
  if (!missing.empty()) throw ResourceError(missing);
  const CudaProbe probe = ProbeCuda(index);
  if (index != kBestGpu) return std::make_shared<CudaRuntimeContext>(probe);  // of a rank, which checks its waits
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<CudaContext>> shared;
  const std::lock_guard lock(mutex);
  std::shared_ptr<CudaContext> gpu = shared[probe.device].lock();
  if (gpu == nullptr) shared[probe.device] = gpu = std::make_shared<CudaRuntimeContext>(probe);
  return gpu;
}

}  // namespace kvanta::kernels
