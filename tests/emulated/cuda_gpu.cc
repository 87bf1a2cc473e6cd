#include "emulated/cuda_gpu.h"

#include <cstring>
#include <string>

#include "emulated/cuda_model.h"
#include "emulated/cuda_primitives.h"
#include "emulated/guarded_device.h"
// Primitives first.
#include "kernels/attention/cuda/append_kernel.h"
#include "kernels/attention/cuda/attention_block.h"
#include "kernels/attention/cuda/kernel_list.h"
#include "kernels/attention/cuda/latent_block.h"

namespace kvanta::testing {
namespace {

using namespace kernels::cuda;  // NOLINT(google-build-using-namespace): this is the unit of those kernels
using emulated::EmulationError;

template <class Format>
void RunAppend(const AppendParams& side) {
  constexpr int kMaxBlocks = 5;  // rows are taken by turns
  RunShape(AppendGrid<Format>::Shape(side, kMaxBlocks), [&] { AppendGrid<Format>::Run(side); });
}

template <class Kernel>
struct BlockOf {
  using Type = AttendBlock<Kernel>;
};
template <>
struct BlockOf<LatentBlock> {
  using Type = LatentBlock;
};

template <class Kernel>
void RunAttend(const AttentionParams& layer) {
  using Block = typename BlockOf<Kernel>::Type;
  constexpr int kBlocks = 3;  // tasks are taken by turns
  RunShape({.blocks = kBlocks, .threads = kAttendWarps * kWarp, .shared_bytes = Block::SharedBytes(layer)},
           [&] { Block::Run(layer); });
}

template <class... Format>
void AppendOf(TypeList<Format...> /*list*/, int kernel, const AppendParams& side) {
  constexpr void (*kRuns[])(const AppendParams&) = {&RunAppend<Format>...};
  kRuns[kernel](side);
}

template <class... Kernel>
void AttendOf(TypeList<Kernel...> /*list*/, int kernel, const AttentionParams& layer) {
  constexpr void (*kRuns[])(const AttentionParams&) = {&RunAttend<Kernel>...};
  kRuns[kernel](layer);
}

class EmulatedGpu final : public kernels::CudaContext {
 public:
  std::string Name() const override { return "cuda-emulated"; }
  Device& device() noexcept override { return device_; }
  int Multiprocessors() const noexcept override { return 2; }  // so that small layers take every tile

  void Append(int kernel, const AppendParams& side) noexcept override {
    Try([=] { AppendOf(AppendFormats{}, kernel, side); });
  }
  void Attend(int kernel, const AttentionParams& layer) noexcept override {
    Try([=] {
      AttendOf(AttendPairs{}, kernel, layer);
      RunShape(CombineShape(layer), [&] { CombineBlock(layer); });
    });
  }
  void Run(const ModelWork& work) noexcept override {
    Try([=] { RunModel(work); });
  }
  void Copy(void* to, const void* from, size_t bytes) noexcept override {
    Try([=] { std::memcpy(to, from, bytes); });
  }
  std::unique_ptr<kernels::LaunchGraph> Record(const std::function<void()>& launches) override {
    auto graph = std::make_unique<Graph>(device_);
    const std::shared_ptr<void> ended(nullptr, [this](void*) { device_.RecordTo(nullptr); });
    device_.RecordTo(&graph->launches);
    launches();
    return graph;
  }
  double Seconds(const std::function<void()>& launches) override {
    launches();
    return 1e-3;  // no figure of an emulation means anything
  }
  void Check() override { device_.Wait(); }

 private:
  // Launches keep the arguments that they were recorded with, as a GPU's do: what changes must be read from memory.
  struct Graph final : kernels::LaunchGraph {
    explicit Graph(GuardedDevice& of) : device(of) {}
    void Run() noexcept override { device.Replay(launches); }

    GuardedDevice& device;
    GuardedDevice::Recording launches;
  };

  // `run` holds what it needs.
  template <class F>
  void Try(F run) noexcept {
    if (device_.CapturedGraph() != nullptr) {
      device_.CapturedGraph()->push_back([this, run] { Try(run); });
      return;
    }
    if (!device_.Error().empty()) return;
    const GuardedDevice::Opened opened(device_);
    try {
      run();
    } catch (const EmulationError& error) {
      device_.Fail(error.what());
    }
  }

  GuardedDevice device_;
};

}  // namespace

std::shared_ptr<kernels::CudaContext> MakeEmulatedGpu() {
  return std::make_shared<EmulatedGpu>();
}

}  // namespace kvanta::testing
