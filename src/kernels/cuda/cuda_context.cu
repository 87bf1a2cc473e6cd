// The machine's best GPU: its memory, one stream, and launches on it.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>

#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/entries.h"
#include "kernels/cuda/cuda_context.h"
#include "kernels/cuda/model_entries.h"
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

// What the runtime hands out, given back when its owner goes or was never finished.
struct DestroyStream {
  void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
};
struct DestroyEvent {
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
struct FreeHost {
  void operator()(void* memory) const { cudaFreeHost(memory); }
};
using Stream = std::unique_ptr<std::remove_pointer_t<cudaStream_t>, DestroyStream>;
using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, DestroyEvent>;
struct DestroyGraph {
  void operator()(cudaGraph_t graph) const { cudaGraphDestroy(graph); }
};
struct DestroyGraphExec {
  void operator()(cudaGraphExec_t graph) const { cudaGraphExecDestroy(graph); }
};
using Graph = std::unique_ptr<std::remove_pointer_t<cudaGraph_t>, DestroyGraph>;
using GraphExec = std::unique_ptr<std::remove_pointer_t<cudaGraphExec_t>, DestroyGraphExec>;
using HostMemory = std::unique_ptr<void, FreeHost>;

Stream MakeStream() {
  cudaStream_t stream = nullptr;
  Require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
  return Stream(stream);
}
Event MakeEvent(unsigned flags) {
  cudaEvent_t event = nullptr;
  Require(cudaEventCreateWithFlags(&event, flags), "making an event");
  return Event(event);
}
HostMemory MakeHostMemory(size_t bytes) {
  void* memory = nullptr;
  Require(cudaMallocHost(&memory, std::max<size_t>(bytes, 1)),
          "allocating " + std::to_string(bytes) + " bytes of page-locked memory");
  return HostMemory(memory);
}

// Where this thread's launches go instead, while they are recorded: other engines' threads go on with the GPU's stream.
thread_local cudaStream_t recording = nullptr;

void RefuseRecorded(const char* what) {
  if (recording != nullptr) throw Error(std::string(what) + " cannot be part of launches that are recorded");
}

// The first error of a launch, for who waits next, and all who wait after: what the GPU holds is not to be trusted.
class FirstError {
 public:
  void Keep(cudaError_t error, const char* where) noexcept {
    if (error == cudaSuccess) return;
    const std::lock_guard lock(mutex_);
    if (error_ != cudaSuccess) return;
    error_ = error;
    where_ = where;
  }
  void Throw(const std::string& gpu) {
    const std::lock_guard lock(mutex_);
    if (error_ == cudaSuccess) return;
    throw ResourceError(std::string(where_) + " failed on " + gpu + ": " + cudaGetErrorString(error_));
  }

 private:
  std::mutex mutex_;
  cudaError_t error_ = cudaSuccess;
  const char* where_ = "";
};

// Page-locked memory through which everything goes to the GPU: a copy from it is asynchronous and at the bus's full
// speed. Two halves: one is filled while the other's copies may still run. Engines of a process share it.
class Staging {
 public:
  explicit Staging(cudaStream_t stream) : stream_(stream), memory_(MakeHostMemory(2 * kHalf)) {
    for (Event& event : copied_) event = MakeEvent(cudaEventDisableTiming);
  }

  void Copy(void* device, const void* host, size_t bytes) {
    const std::lock_guard lock(mutex_);
    for (size_t done = 0; done < bytes;) {
      if (used_ == kHalf) SwapHalf();
      const size_t piece = std::min(bytes - done, kHalf - used_);
      auto* staged = static_cast<uint8_t*>(memory_.get()) + half_ * kHalf + used_;
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

  void SwapHalf() {
    Require(cudaEventRecord(copied_[half_].get(), stream_), "recording an event");
    half_ = 1 - half_;
    used_ = 0;
    Require(cudaEventSynchronize(copied_[half_].get()), "waiting for a copy");
  }

  cudaStream_t stream_;
  HostMemory memory_;
  Event copied_[2];
  std::mutex mutex_;
  size_t half_ = 0;
  size_t used_ = 0;
};

// Each thread has a current device of its own, the first one until it says otherwise.
class CudaDevice final : public Device {
 public:
  CudaDevice(int device, cudaStream_t stream, FirstError& first_error)
      : device_(device),
        stream_(stream),
        first_error_(first_error),
        name_("cuda:" + std::to_string(device)),
        staging_(stream) {}

  std::string_view Name() const noexcept override { return name_; }

  Buffer Allocate(size_t bytes) override {
    void* data = nullptr;
    RefuseRecorded("allocating memory");
    Use();
    Require(cudaMalloc(&data, std::max<size_t>(bytes, 1)),
            "allocating " + std::to_string(bytes) + " bytes of GPU memory");
    // cudaFree waits for what was launched: nothing that still runs reads memory that is gone.
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
    RefuseRecorded("a copy from the host");
    Use();
    staging_.Copy(device, host, bytes);
  }
  void CopyOut(void* host, const void* device, size_t bytes) override {
    CopyOutAsync(host, device, bytes);
    Wait();
  }
  void CopyOutAsync(void* host, const void* device, size_t bytes) override {
    Use();
    Require(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, recording != nullptr ? recording : stream_),
            "copying from the GPU");
  }
  void Wait() override {
    RefuseRecorded("waiting");
    Use();
    first_error_.Keep(cudaStreamSynchronize(stream_), "a kernel");
    first_error_.Throw(name_);
  }
  void Fill(void* device, uint8_t byte, size_t bytes) override {
    RefuseRecorded("filling memory");
    Use();
    Require(cudaMemsetAsync(device, byte, bytes, stream_), "filling GPU memory");
  }
  int64_t AvailableBytes() const override {
    size_t available = 0;
    size_t total = 0;
    Use();
    Require(cudaMemGetInfo(&available, &total), "asking for the GPU's memory");
    return static_cast<int64_t>(available);
  }

 private:
  void Use() const { Require(cudaSetDevice(device_), "choosing the GPU"); }

  int device_;
  cudaStream_t stream_;
  FirstError& first_error_;
  std::string name_;
  Staging staging_;
};

class CudaContextImpl final : public CudaContext {
 public:
  explicit CudaContextImpl(const CudaProbe& probe) : name_("cuda-" + CudaUnit()), index_(probe.best) {
    Require(cudaSetDevice(index_), "choosing the GPU");
    Require(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, index_),
            "asking for the GPU's multiprocessors");
    stream_ = MakeStream();
    device_ = std::make_unique<CudaDevice>(index_, stream_.get(), first_error_);
  }
  ~CudaContextImpl() override { cudaStreamSynchronize(stream_.get()); }
  CudaContextImpl(const CudaContextImpl&) = delete;
  CudaContextImpl& operator=(const CudaContextImpl&) = delete;

  std::string Name() const override { return name_; }
  Device& device() noexcept override { return *device_; }
  int Multiprocessors() const noexcept override { return multiprocessors_; }

  void Append(int kernel, const cuda::AppendParams& side) noexcept override {
    Use();
    constexpr int kBlocksOfOne = 8;  // of a multiprocessor
    cuda::LaunchAppend(kernel, side, kBlocksOfOne * multiprocessors_, Current());
    Keep(cudaPeekAtLastError(), "an append kernel");
  }
  void Attend(int kernel, const cuda::AttentionParams& layer) noexcept override {
    Use();
    constexpr int kBlocksOfOne = 4;  // of a multiprocessor; more than fit wait their turn
    cuda::LaunchAttend(kernel, layer, kBlocksOfOne * multiprocessors_, Current());
    Keep(cudaPeekAtLastError(), "an attention kernel");
    cuda::LaunchCombine(layer, Current());
    Keep(cudaPeekAtLastError(), "a merge kernel");
  }
  void Run(const cuda::ModelWork& work) noexcept override {
    Use();
    cuda::LaunchModel(work, Current());
    Keep(cudaPeekAtLastError(), "a kernel of the model");
  }
  void Copy(void* to, const void* from, size_t bytes) noexcept override {
    Use();
    Keep(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, Current()), "a copy");
  }
  std::unique_ptr<LaunchGraph> Record(const std::function<void()>& launches) override {
    Require(cudaSetDevice(index_), "choosing the GPU");
    const Stream stream = MakeStream();
    // Of this thread alone: others may allocate meanwhile.
    Require(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "recording launches");
    cudaGraph_t recorded = nullptr;
    cudaError_t error = cudaSuccess;
    try {
      recording = stream.get();
      launches();
      recording = nullptr;
      error = cudaStreamEndCapture(stream.get(), &recorded);
    } catch (...) {
      recording = nullptr;
      cudaStreamEndCapture(stream.get(), &recorded);
      const Graph dropped(recorded);
      throw;
    }
    const Graph graph(recorded);
    Require(error, "recording launches (enforce_eager does without)");
    cudaGraphExec_t made = nullptr;
    Require(cudaGraphInstantiate(&made, graph.get(), 0), "making a graph of launches (enforce_eager does without)");
    return std::make_unique<CudaGraph>(*this, GraphExec(made));
  }
  double Seconds(const std::function<void()>& launches) override {
    Use();
    const Event begin = MakeEvent(cudaEventDefault);
    const Event end = MakeEvent(cudaEventDefault);
    Require(cudaEventRecord(begin.get(), stream_.get()), "recording an event");
    launches();
    Require(cudaEventRecord(end.get(), stream_.get()), "recording an event");
    Require(cudaEventSynchronize(end.get()), "waiting for the GPU");
    float milliseconds = 0;
    Require(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()), "reading the GPU's clock");
    return milliseconds * 1e-3;
  }
  void Check() override { device_->Wait(); }

 private:
  class CudaGraph final : public LaunchGraph {
   public:
    CudaGraph(CudaContextImpl& gpu, GraphExec graph) : gpu_(gpu), graph_(std::move(graph)) {}
    void Run() noexcept override {
      gpu_.Use();
      gpu_.Keep(cudaGraphLaunch(graph_.get(), gpu_.stream_.get()), "a graph of launches");
    }

   private:
    CudaContextImpl& gpu_;
    GraphExec graph_;
  };

  cudaStream_t Current() const noexcept { return recording != nullptr ? recording : stream_.get(); }
  void Use() noexcept { Keep(cudaSetDevice(index_), "choosing the GPU"); }
  void Keep(cudaError_t error, const char* where) noexcept { first_error_.Keep(error, where); }

  std::string name_;
  int index_;
  int multiprocessors_ = 1;
  FirstError first_error_;
  Stream stream_;
  std::unique_ptr<CudaDevice> device_;  // gone before the stream
};

}  // namespace

std::shared_ptr<CudaContext> MakeCudaContext() {
  if (const std::string missing = MissingForCuda(); !missing.empty()) throw ResourceError(missing);
  static std::mutex mutex;
  static std::weak_ptr<CudaContext> made;
  const std::lock_guard lock(mutex);
  std::shared_ptr<CudaContext> gpu = made.lock();
  if (gpu == nullptr) made = gpu = std::make_shared<CudaContextImpl>(ProbeCuda());
  return gpu;
}

}  // namespace kvanta::kernels
