// NVIDIA GPUs behind an interface without CUDA headers, available in builds without CUDA, too.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "base/device.h"
#include "kernels/attention/cuda/attention_params.h"
#include "kernels/cuda/model_ops.h"
#include "kernels/launch_graph.h"
#include "kernels/ops.h"
#include "parallel/nccl.h"

namespace kvanta::kernels {

// One GPU: its memory and one stream of kernels. Tests use an emulated one.
class CudaContext {
 public:
  virtual ~CudaContext() = default;
  virtual std::string Name() const = 0;  // "cuda-sm90"
  virtual Device& device() noexcept = 0;
  virtual int Multiprocessors() const noexcept = 0;

  // Blocks of an attention kernel (an index from cuda::FindAttend) that run at once: Attend's grid.
  virtual int64_t AttentionBlocks(int kernel, const cuda::AttentionParams& params) noexcept = 0;
  // The same for tile groups; 0: the kernel does not take them, or this GPU's shared memory is too small.
  virtual int64_t GroupBlocks(int kernel, const cuda::AttentionParams& params) noexcept = 0;

  // Asynchronous launches, in call order and after earlier copies; `kernel` is an index from cuda::FindAppend or
  // FindAttend. Errors are kept, and thrown by the device's Synchronize and CopyOut.
  virtual void Append(int kernel, const cuda::AppendSides& sides) noexcept = 0;
  virtual void Attend(int kernel,
                      const cuda::AttentionParams& params) noexcept = 0;     // KV splits and their combination
  virtual void Run(const cuda::ModelOp& op) noexcept = 0;                    // grid must not be empty
  virtual void Copy(void* to, const void* from, size_t bytes) noexcept = 0;  // within device memory

  // Name of the NCCL library whose gathers can run on this GPU; "": none can.
  virtual std::string NcclLibrary() const = 0;
  // Makes it the calling thread's current GPU.
  virtual void Select() = 0;
  // A gather as a launch (parallel::NcclGroup). Errors are kept, as those of other launches.
  virtual void AllGather(parallel::NcclGroup& ranks, const void* own, void* all, size_t bytes) noexcept = 0;
  // Called again and again while the host waits for the GPU, with the time that it has waited: throws to end the wait.
  // Null: nothing is called.
  using WaitCheck = std::function<void(std::chrono::duration<double> waited)>;
  virtual void SetWaitCheck(WaitCheck check) = 0;

  // Captures what `launches` launches instead of running it. `launches` must not allocate, synchronize or copy from the
  // host. Throws ResourceError.
  virtual std::unique_ptr<LaunchGraph> Capture(const std::function<void()>& launches) = 0;

  // Runs `before`, then `launches`, and waits. Returns the GPU time of `launches` in seconds. Work before it hides the
  // time that the host takes to launch.
  virtual double Seconds(const std::function<void()>& before, const std::function<void()>& launches) = 0;
};

// Minimum compute capability, times 10: Ampere.
inline constexpr int kMinCapability = 80;

// Returns why this program cannot use a GPU of this machine ("this build has no CUDA support", "no NVIDIA driver ..."),
// or "". Starts no work on a GPU and allocates nothing there.
std::string MissingForCuda();
// The same for the first `count` GPUs, of which each rank of this machine has one.
std::string MissingForCuda(int count);

// "sm90" or "sm80", by this machine's best GPU; "" without a usable one.
std::string CudaUnit();

// GPU `index` of those that CUDA lists (environment variable CUDA_VISIBLE_DEVICES), or the best one; concurrent holders
// share one object. Throws ResourceError with MissingForCuda()'s message.
inline constexpr int kBestGpu = -1;
std::shared_ptr<CudaContext> MakeCudaContext(int index = kBestGpu);

// A model's operations on a GPU, asynchronous and in call order. `threads`: for packing weights.
std::unique_ptr<Ops> MakeGpuOps(std::shared_ptr<CudaContext> gpu, std::shared_ptr<ThreadPool> threads);

}  // namespace kvanta::kernels
