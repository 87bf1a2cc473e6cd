// Linear layers on this machine's GPU: weight bytes per second as a share of the copy bandwidth, and FLOP/s, for every
// weight type and several numbers of rows. Each result is verified against the CPU's first.
//
//   gpu_linear_bench [--shape OUTxIN ...] [--rows 1 8 64 512] [--json FILE]
//
// Exit status 77 without a usable GPU.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "bench/option_parser.h"
#include "bench/random_values.h"
#include "kernels/cuda/cuda_context.h"
#include "kvanta/error.h"

namespace {

using namespace kvanta;           // NOLINT(google-build-using-namespace): this program is about it
using namespace kvanta::kernels;  // NOLINT(google-build-using-namespace)

constexpr int kRuns = 9;
constexpr size_t kCopy = size_t{256} << 20;
constexpr int64_t kVerifiedRows = 64;  // maximum; computed on the CPU
constexpr WeightType kTypes[] = {WeightType::kBf16, WeightType::kF16, WeightType::kInt8, WeightType::kInt4};

struct Shape {
  int64_t out, in;
};
struct Options {
  std::vector<Shape> shapes = {{6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}, {576, 576}, {49152, 576}};
  std::vector<int64_t> rows = {1, 8, 64, 512};
  std::string json;
};

Options ParseArguments(int argc, char** argv) {
  Options options;
  OptionParser parser;
  parser.Pairs("--shape", options.shapes);
  parser.Option("--rows", options.rows);
  parser.Option("--json", options.json);
  parser.Parse(argc, argv);
  return options;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

class Bench {
 public:
  explicit Bench(const Options& options)
      : options_(options),
        threads_(std::make_shared<ThreadPool>(0)),
        ops_(MakeGpuOps(gpu_, threads_)),
        cpu_(MakeCpuOps(threads_)),
        from_(gpu_->device().Allocate(kCopy)),
        to_(gpu_->device().Allocate(kCopy)) {}

  nlohmann::json Run() {
    nlohmann::json rows = nlohmann::json::array();
    for (const Shape shape : options_.shapes) {
      const std::vector<float> w = NormalValues(shape.out * shape.in, 1, 1 / std::sqrt(static_cast<float>(shape.in)));
      const weights::WeightView view{w.data(), DType::kF32, shape.out, shape.in};
      for (const WeightType type : kTypes) Measure(view, type, rows);
    }
    return rows;
  }

 private:
  void Measure(const weights::WeightView& view, WeightType type, nlohmann::json& rows) {
    const int64_t max_rows = *std::max_element(options_.rows.begin(), options_.rows.end());
    const auto linear = ops_->MakeLinear({&view, 1}, {}, type);
    const std::vector<float> x = NormalValues(max_rows * view.in, 2, 1);
    Device& device = gpu_->device();
    const Buffer device_x = device.Allocate(x.size() * sizeof(float));
    device.CopyIn(device_x.data(), x.data(), device_x.bytes());
    const Buffer y = device.Allocate(static_cast<size_t>(max_rows * view.out) * sizeof(float));
    std::vector<float> expected(static_cast<size_t>(std::min(kVerifiedRows, max_rows) * view.out));
    cpu_->MakeLinear({&view, 1}, {}, {type, true})
        ->Forward(x.data(), std::min(kVerifiedRows, max_rows), expected.data(), view.out);
    for (const int64_t count : options_.rows) {
      const double error = Error(*linear, count, view.out, expected, device_x, y);
      std::vector<double> runs, copies;
      for (int run = 0; run < kRuns; ++run) {
        const auto copy = [&] { gpu_->Copy(to_.data(), from_.data(), kCopy); };
        copies.push_back(gpu_->Seconds(copy, copy));
        runs.push_back(
            gpu_->Seconds(copy, [&] { linear->Forward(device_x.as<float>(), count, y.as<float>(), view.out); }));
      }
      gpu_->device().Synchronize();
      const double seconds = Median(runs), copy = 2 * static_cast<double>(kCopy) / Median(copies);
      const double read = static_cast<double>(linear->WeightBytes()) / seconds;
      const double flops = 2 * static_cast<double>(view.out * view.in * count) / seconds;
      fmt::print(
          "{:>6} x {:<6} {:<5} {:>4} rows {:8.1f} us  {:7.1f} GB/s of {:7.1f}: {:5.1f} %  {:6.1f} TFLOP/s  "
          "error {:.1e}\n",
          view.out, view.in, linear->Kind(), count, seconds * 1e6, read * 1e-9, copy * 1e-9, 100 * read / copy,
          flops * 1e-12, error);
      rows.push_back({{"out", view.out},
                      {"in", view.in},
                      {"weights", linear->Kind()},
                      {"rows", count},
                      {"ns_median", seconds * 1e9},
                      {"weight_gb_s", read * 1e-9},
                      {"copy_gb_s", copy * 1e-9},
                      {"share_of_limit", read / copy},
                      {"tflop_s", flops * 1e-12},
                      {"max_error", error}});
    }
  }

  // Largest error against the CPU's result (standard deviation 1) over the first rows. Run for each number of rows,
  // since tiles depend on it.
  double Error(const Linear& linear, int64_t count, int64_t outs, const std::vector<float>& expected,
               const Buffer& device_x, const Buffer& y) {
    std::vector<float> found(static_cast<size_t>(std::min(kVerifiedRows, count) * outs));
    linear.Forward(device_x.as<float>(), count, y.as<float>(), outs);
    gpu_->device().CopyOut(found.data(), y.data(), found.size() * sizeof(float));
    double error = 0;
    for (size_t i = 0; i < found.size(); ++i) {
      const double difference = std::abs(double{found[i]} - double{expected[i]});
      if (!(difference <= error)) error = difference;
    }
    constexpr double kMaxError = 5e-3;  // x is f16 on one device, f32 or 16-bit integers on the other
    if (!(error < kMaxError))
      throw kvanta::Error(
          fmt::format("{}: differs from the CPU by {}; expected below {}", linear.Kind(), error, kMaxError));
    return error;
  }

  const Options& options_;
  std::shared_ptr<CudaContext> gpu_ = MakeCudaContext();
  std::shared_ptr<ThreadPool> threads_;
  std::unique_ptr<Ops> ops_, cpu_;
  Buffer from_, to_;
};

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = ParseArguments(argc, argv);
    if (const std::string missing = MissingForCuda(); !missing.empty()) {
      fmt::print("skipped: {}\n", missing);
      return 77;
    }
    const nlohmann::json rows = Bench(options).Run();
    if (!options.json.empty()) std::ofstream(options.json) << rows.dump(1) << '\n';
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "gpu_linear_bench: {}\n", error.what());
    return 1;
  }
}
