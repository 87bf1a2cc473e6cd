// A layer of experts on the CPU: weight bytes per second of a decode step as a share of the machine's read bandwidth,
// and time of more rows. Each result is compared with the same rows one by one first.
//
//   experts_bench [--experts 128] [--top-k 8] [--hidden 2048] [--width 768] [--weights int4] [--rows 1 8 64 512]
//                 [--threads 2] [--isa auto]
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "bench/linear_bench.h"
#include "bench/option_parser.h"
#include "bench/random_values.h"
#include "kernels/ops.h"

namespace {

using namespace kvanta;           // NOLINT(google-build-using-namespace): this program is about it
using namespace kvanta::kernels;  // NOLINT(google-build-using-namespace)

constexpr int kRuns = 40;
const std::map<std::string, WeightType> kTypes = {{"bf16", WeightType::kBf16},
                                                  {"f32", WeightType::kF32},
                                                  {"f16", WeightType::kF16},
                                                  {"int8", WeightType::kInt8},
                                                  {"int4", WeightType::kInt4}};

struct Options {
  std::map<std::string, int64_t> numbers = {
      {"--experts", 128}, {"--top-k", 8}, {"--hidden", 2048}, {"--width", 768}, {"--threads", 2}};
  std::string weights = "int4", isa = "auto";
  std::vector<int64_t> rows = {1, 8, 64, 512};
};

Options ParseArguments(int argc, char** argv) {
  Options options;
  OptionParser parser;
  for (auto& [name, number] : options.numbers) parser.Option(name, number);
  parser.Option("--weights", options.weights);
  parser.Option("--isa", options.isa);
  parser.Option("--rows", options.rows);
  parser.Parse(argc, argv);
  if (!kTypes.contains(options.weights)) {
    std::string known;
    for (const auto& [name, type] : kTypes) known += fmt::format("{}{}", known.empty() ? "" : ", ", name);
    throw InputError(fmt::format("--weights {}: known: {}", options.weights, known));
  }
  return options;
}

// Experts whose weights are parts of the same random numbers: their speed does not depend on the values.
std::vector<ExpertWeights> MakeExperts(Ops& ops, int64_t count, int64_t hidden, int64_t width, WeightType type) {
  const std::vector<float> values = NormalValues(2 * width * hidden + count, 1, 0.02F);
  const auto make = [&](int64_t first, int64_t out, int64_t in) {
    const weights::WeightView view{.data = values.data() + first, .dtype = DType::kF32, .out = out, .in = in};
    return ops.MakeLinear({&view, 1}, {}, type);
  };
  std::vector<ExpertWeights> experts;
  for (int64_t i = 0; i < count; ++i) {
    auto gate_up = make(i, 2 * width, hidden);
    experts.push_back({.gate_up = std::move(gate_up), .down = make(i, hidden, width)});
  }
  return experts;
}

// Seconds of the fastest and the median run; every run has other rows, so that decode chooses other experts.
std::pair<double, double> Time(ExpertLayer& layer, const std::vector<float>& x, const std::vector<float>& logits,
                               int64_t rows, int64_t hidden, int64_t experts, std::vector<float>& out) {
  std::vector<double> seconds;
  const int64_t batches = std::ssize(logits) / (rows * experts);
  for (int run = 0; run < kRuns; ++run) {
    const int64_t first = run % batches * rows;
    const auto start = std::chrono::steady_clock::now();
    layer.Forward(x.data() + first * hidden, logits.data() + first * experts, rows, out.data());
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(seconds.begin(), seconds.end());
  return {seconds.front(), seconds[seconds.size() / 2]};
}

void Run(const Options& options) {
  const auto number = [&](const char* name) { return options.numbers.at(name); };
  const int64_t hidden = number("--hidden"), width = number("--width"), experts = number("--experts");
  const int64_t top_k = number("--top-k"), max_rows = *std::max_element(options.rows.begin(), options.rows.end());
  const auto threads = static_cast<int>(number("--threads"));
  const auto ops = MakeCpuOps(std::make_shared<ThreadPool>(threads), options.isa.c_str());
  auto weights = MakeExperts(*ops, experts, hidden, width, kTypes.at(options.weights));
  const int64_t bytes = weights.front().gate_up->WeightBytes() + weights.front().down->WeightBytes();
  const MoeConfig moe{.num_experts = static_cast<int32_t>(experts),
                      .num_experts_per_tok = static_cast<int32_t>(top_k),
                      .norm_topk_prob = true};
  const auto layer = ops->MakeExperts(std::move(weights), moe, {}, {});
  const LinearRoofline limits = MeasureLinearRoofline(options.weights, options.isa, threads);
  fmt::print("{} experts of {} x {}, {} of a row, {}, {} threads; reads {:.1f} GB/s\n", experts, hidden, width, top_k,
             options.weights, threads, limits.read_bytes / 1e9);
  const int64_t all_rows = std::max<int64_t>(max_rows, 64);
  const std::vector<float> x = NormalValues(all_rows * hidden, 2, 1), logits = NormalValues(all_rows * experts, 3, 1);
  std::vector<float> out(static_cast<size_t>(all_rows * hidden)), one(static_cast<size_t>(hidden));
  for (const int64_t rows : options.rows) {
    layer->Forward(x.data(), logits.data(), rows, out.data());
    for (const int64_t row : {int64_t{0}, rows - 1}) {
      layer->Forward(x.data() + row * hidden, logits.data() + row * experts, 1, one.data());
      if (std::memcmp(one.data(), out.data() + row * hidden, one.size() * sizeof(float)) != 0) {
        throw Error(fmt::format("row {} of {} has other bits than alone", row, rows));
      }
    }
    const auto [best, median] = Time(*layer, x, logits, rows, hidden, experts, out);
    const double macs = static_cast<double>(rows * top_k * 3 * hidden * width);
    fmt::print("{:5} rows: best {:9.1f} us, median {:9.1f} us, {:6.1f} G operations/s", rows, best * 1e6, median * 1e6,
               2e-9 * macs / median);
    if (rows == 1) {
      const double rate = static_cast<double>(top_k * bytes) / median;
      fmt::print(", {:.1f} GB/s, {:.0f} % of the bandwidth", rate / 1e9, 100 * rate / limits.read_bytes);
    }
    fmt::print("\n");
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Run(ParseArguments(argc, argv));
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "experts_bench: {}\n", error.what());
    return 1;
  }
}
