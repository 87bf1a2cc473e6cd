#include "emulated/cuda_gpu.h"

#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "emulated/cuda_primitives.h"
#include "emulated/cuda_warpgroup.h"
#include "emulated/guarded_device.h"
// Primitives first.
#include "kernels/attention/cuda/append_kernel.h"
#include "kernels/attention/cuda/attention_block.h"
#include "kernels/attention/cuda/gather_rows_kernel.h"
#include "kernels/attention/cuda/group_block.h"
#include "kernels/attention/cuda/kernel_list.h"
#include "kernels/attention/cuda/latent_block.h"
#include "kernels/attention/cuda/score_block.h"
#include "kernels/compression/cuda/compressor_kernels.h"
#include "kernels/cuda/launch_clock.h"
#include "kernels/cuda/row_kernels.h"
#include "kernels/hyper_connections/cuda/stream_kernels.h"
#include "kernels/linear/cuda/linear_kernels.h"
#include "kernels/linear/cuda/pack_kernel.h"
#include "kernels/linear_attention/cuda/gated_norm_kernel.h"
#include "kernels/linear_attention/cuda/state_scan_kernel.h"
#include "kernels/moe/cuda/expert_kernels.h"
#include "kernels/sampling/cuda/sample_kernel.h"

namespace kvanta::testing {
namespace {

using namespace kernels::cuda;  // NOLINT(google-build-using-namespace): the kernels' unit
using emulated::EmulationError;

template <class Listed>
void RunAppend(const AppendSides& sides) {
  AppendSides limited = sides;
  limited.max_blocks = 5;  // below the rows' need: exercises the grid-stride loop
  RunShape(AppendKernelOf<Listed>::Shape(limited), [&] { AppendKernelOf<Listed>::Run(limited); });
}

constexpr int kAttentionBlocks = 5;
constexpr int kSharedBytes = 227 << 10;  // of a block, as of compute capability 9.0

template <class Kernel>
struct BlockOf {
  using Type = AttentionBlock<Kernel>;
};
template <>
struct BlockOf<LatentBlock> {
  using Type = LatentBlock;
};

template <class Listed>
void RunAttend(const AttentionParams& params) {
  VisitKernel<Listed>(params, [&]<class Kernel>(Kernel*) {
    using Block = typename BlockOf<Kernel>::Type;
    constexpr int kBlocks = kAttentionBlocks - 2;  // exercises the grid-stride loop
    RunShape({.blocks = kBlocks, .threads = Block::kThreads, .shared_bytes = Block::SharedBytes(params)},
             [&] { Block::Run(params); });
  });
}

// Calls f with a null pointer to the block that takes a kernel's tile groups, if there is one.
template <class Listed, class F>
void VisitGroupBlock(const AttentionParams& params, F f) {
  if constexpr (std::is_same_v<Listed, LatentBlock>) {
    VisitLatentGroup(params, f);
  } else if constexpr (kTakesGroups<Listed>) {
    f(static_cast<const GroupBlock<GroupKernel<Listed>, false>*>(nullptr));
  }
}

// Shared memory of a block of tile groups; 0: the kernel does not take them.
template <class Listed>
int GroupBytes(const AttentionParams& params) {
  int bytes = 0;
  VisitGroupBlock<Listed>(params, [&]<class Block>(const Block*) { bytes = Block::SharedBytes(params); });
  return bytes;
}

template <class Listed>
void RunGroups(const AttentionParams& params, bool warpgroups) {
  if (GroupBytes<Listed>(params) == 0) emulated::Stop("this kernel takes no tile groups");
  VisitGroupBlock<Listed>(params, [&]<class Block>(const Block*) {
    constexpr int kBlocks = kAttentionBlocks - 2;
    RunShape({.blocks = kBlocks, .threads = Block::kThreads, .shared_bytes = Block::SharedBytes(params)}, [&] {
      if constexpr (kTakesGroups<Listed> && !std::is_same_v<Listed, LatentBlock>) {
        if (warpgroups) return GroupBlock<GroupKernel<Listed>, true>::Run(params);
      }
      Block::Run(params);
    });
  });
}

template <class... Listed>
void RunAppendFrom(TypeList<Listed...> /*list*/, int kernel, const AppendSides& sides) {
  constexpr void (*kRuns[])(const AppendSides&) = {&RunAppend<Listed>...};
  kRuns[kernel](sides);
}

template <class... Kernel>
void RunAttendFrom(TypeList<Kernel...> /*list*/, int kernel, const AttentionParams& params) {
  constexpr void (*kRuns[])(const AttentionParams&) = {&RunAttend<Kernel>...};
  kRuns[kernel](params);
}

template <class... Kernel>
int GroupBytesFrom(TypeList<Kernel...> /*list*/, int kernel, const AttentionParams& params) {
  constexpr int (*kBytes[])(const AttentionParams&) = {&GroupBytes<Kernel>...};
  return kBytes[kernel](params);
}

template <class... Kernel>
void RunGroupsFrom(TypeList<Kernel...> /*list*/, int kernel, const AttentionParams& params, bool warpgroups) {
  constexpr void (*kRuns[])(const AttentionParams&, bool) = {&RunGroups<Kernel>...};
  kRuns[kernel](params, warpgroups);
}

struct KernelLauncher {
  template <class Kernel, class Op>
  void Launch(const Op& op) const {
    RunShape(Kernel::Shape(op), [&] { Kernel::Run(op); });
  }
};

void RunOp(const ModelOp& model_op) {
  const auto run = []<class Op>(const Op& op) {
    if constexpr (std::is_same_v<Op, LinearOp>) {
      LaunchLinearKernel(op, KernelLauncher{});
    } else if constexpr (std::is_same_v<Op, ScoreTokensOp>) {
      RunShape(ScoreBlock::Shape(op), [&] { ScoreBlock::Run(op); });
    } else if constexpr (std::is_same_v<Op, StateScanOp>) {
      LaunchScanKernel(op, KernelLauncher{});
    } else {
      RunShape(ShapeOf(op), [&] { RunBlock(op); });
    }
  };
  std::visit(run, model_op);
}

class EmulatedGpu final : public kernels::CudaContext {
 public:
  explicit EmulatedGpu(EmulatedGpuOptions options) : options_(std::move(options)) {}

  std::string Name() const override { return "cuda-emulated"; }
  Device& device() noexcept override { return device_; }
  int Multiprocessors() const noexcept override { return 2; }  // small layers then use every tile

  void Append(int kernel, const AppendSides& sides) noexcept override {
    Launch([=, this] {
      device_.CountLaunch();
      RunAppendFrom(AppendKernels{}, kernel, sides);
    });
  }
  int64_t AttentionBlocks(int /*kernel*/, const AttentionParams& /*params*/) noexcept override {
    return kAttentionBlocks;
  }
  int64_t GroupBlocks(int kernel, const AttentionParams& params) noexcept override {
    const int bytes = GroupBytesFrom(AttentionKernels{}, kernel, params);
    return bytes != 0 && bytes <= kSharedBytes ? kAttentionBlocks : 0;
  }
  void Attend(int kernel, const AttentionParams& params) noexcept override {
    Launch([=, this] {
      if (params.group_metadata != nullptr) {
        device_.CountLaunch();
        RunGroupsFrom(AttentionKernels{}, kernel, params, options_.warpgroups);
      }
      if (params.has_tiles) {
        device_.CountLaunch();
        RunAttendFrom(AttentionKernels{}, kernel, params);
      }
      if (params.CombinesTiles()) return;
      device_.CountLaunch();
      RunShape(CombineShape(params), [&] { CombineBlock(params); });
    });
  }
  void Run(const ModelOp& op) noexcept override {
    Launch([=, this] {
      device_.CountLaunch();
      RunOp(op);
    });
  }
  void Copy(void* to, const void* from, size_t bytes) noexcept override {
    Launch([=] { std::memcpy(to, from, bytes); });
  }
  std::string NcclLibrary() const override { return options_.nccl_library; }
  void Select() override {}
  void AllGather(parallel::NcclGroup& ranks, const void* own, void* all, size_t bytes) noexcept override {
    Launch([&ranks, own, all, bytes] {
      const std::string error = ranks.AllGather(own, all, bytes, nullptr);
      if (!error.empty()) throw EmulationError(error);
    });
  }
  void SetWaitCheck(WaitCheck check) override { device_.SetWaitCheck(std::move(check)); }
  std::chrono::duration<double> LaunchTime() const noexcept override { return clock_.Time(); }
  std::unique_ptr<kernels::LaunchGraph> Capture(const std::function<void()>& launches) override {
    auto graph = std::make_unique<Graph>(device_);
    const std::shared_ptr<void> end(nullptr, [this](void*) { device_.CaptureTo(nullptr); });
    device_.CaptureTo(&graph->launches);
    launches();
    return graph;
  }
  double Seconds(const std::function<void()>& before, const std::function<void()>& launches) override {
    before();
    launches();
    return 1e-3;  // arbitrary
  }

 private:
  // Launches keep the arguments they were captured with, as on a GPU.
  struct Graph final : kernels::LaunchGraph {
    explicit Graph(GuardedDevice& d) : device(d) {}
    void Run() noexcept override { device.Replay(launches); }

    GuardedDevice& device;
    GuardedDevice::Graph launches;
  };

  // Runs or captures a launch; `run` owns its arguments.
  template <class F>
  void Launch(F run) noexcept {
    if (device_.Capture() != nullptr) {
      device_.Capture()->push_back([this, run] { Launch(run); });
      return;
    }
    if (!device_.Error().empty()) return;
    const GuardedDevice::Access access(device_);
    const kernels::LaunchClock::Launching launching(clock_);
    try {
      run();
    } catch (const EmulationError& error) {
      device_.Fail(error.what());
    }
  }

  const EmulatedGpuOptions options_;
  kernels::LaunchClock clock_;
  GuardedDevice device_;
};

}  // namespace

std::shared_ptr<kernels::CudaContext> MakeEmulatedGpu(EmulatedGpuOptions options) {
  return std::make_shared<EmulatedGpu>(std::move(options));
}

}  // namespace kvanta::testing
