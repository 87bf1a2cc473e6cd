// NVIDIA GPUs as the layers above see them: no header of CUDA is needed to use this, nor to build without.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "base/device.h"
#include "kernels/attention/cuda/launch.h"
#include "kernels/cuda/model_work.h"
#include "kernels/launch_graph.h"

namespace kvanta::kernels {

// One GPU: its memory and its kernels, in one order. Tests have one that is emulated.
class CudaContext {
 public:
  virtual ~CudaContext() = default;
  virtual std::string Name() const = 0;  // "cuda-sm90"
  virtual Device& device() noexcept = 0;
  virtual int Multiprocessors() const noexcept = 0;

  // Launches; `kernel` is an index that cuda::FindAppend or FindAttend gave. They run in the order of the calls, after
  // copies that began before; an error is kept for Check, and for the device's Wait and CopyOut.
  virtual void Append(int kernel, const cuda::AppendParams& side) noexcept = 0;
  virtual void Attend(int kernel, const cuda::AttentionParams& layer) noexcept = 0;  // all runs, and their merge
  virtual void Run(const cuda::ModelWork& work) noexcept = 0;                        // at least one block
  // Within the GPU's memory, in that order, too.
  virtual void Copy(void* to, const void* from, size_t bytes) noexcept = 0;

  // What `launches` would begin, none of which begins now; it allocates nothing, waits for nothing and copies nothing
  // from the host. Throws ResourceError.
  virtual std::unique_ptr<LaunchGraph> Record(const std::function<void()>& launches) = 0;

  // Seconds that the GPU takes for what `launches` begins, by its own clock; waits for it.
  virtual double Seconds(const std::function<void()>& launches) = 0;

  // Waits for all launches. Throws ResourceError with the first one's error.
  virtual void Check() = 0;
};

// The least compute capability that the kernels are compiled for, times 10: Ampere.
inline constexpr int kMinCapability = 80;

// Why this program cannot compute on a GPU of this machine, in words ("this build is without CUDA", "no NVIDIA driver
// ..."); empty where it can. Starts no work on a GPU and keeps no memory there.
std::string MissingForCuda();

// "sm90" or "sm80", by the best GPU of this machine; empty where MissingForCuda has words.
std::string CudaUnit();

// The best GPU of this machine, the same object for all who hold it at a time. Throws ResourceError with
// MissingForCuda()'s words.
std::shared_ptr<CudaContext> MakeCudaContext();

}  // namespace kvanta::kernels
