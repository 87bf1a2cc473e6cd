// Ranks whose model is on GPUs: columns are gathered in the memory of each one's GPU.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "kernels/cuda/cuda_context.h"
#include "parallel/communicator.h"

namespace kvanta::kernels {

struct GpuRanks {
  std::shared_ptr<CudaContext> gpu;                        // of this rank
  std::shared_ptr<parallel::Communicator> host;            // between the processes
  std::chrono::seconds timeout = std::chrono::minutes(2);  // limit for gathers
  std::function<void(const std::string&)> on_warning;      // rank 0: why gathers pass through the host; may be null
};

// AllGatherColumns and GatherColumns take the GPU's memory, and everything else is the host's. They use NCCL, as
// launches of the GPU, where all ranks can load CudaContext::NcclLibrary(), and the host's memory and communicator
// otherwise: with the same bits. All ranks call it. Throws ResourceError, RankLostError.
std::shared_ptr<parallel::Communicator> MakeGpuCommunicator(GpuRanks ranks);

}  // namespace kvanta::kernels
