// Speed of the linear layers, as shares of what this machine can do: one row by the read bandwidth of memory, many rows
// by the peak of the dot product. Each layer's result is verified against double before it is timed.
//
//   linear_bench [--isa NAME] [--threads 1,2] [--rows 1,8,64,256,1024] [--layers NAME,...]
//                [--stores bf16,int8,int4] [--seconds 0.3] [--json FILE]
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "kernels/cpu/machine_limits.h"
#include "kernels/cpu/select.h"
#include "kernels/ops.h"

namespace {

using kvanta::DType;
using kvanta::kernels::kBlockWeights;
using kvanta::kernels::Linear;
using kvanta::kernels::WeightType;
using kvanta::kernels::WeightView;

struct Layer {
  std::string name;
  int64_t in;
  int64_t out;
};

// SmolLM2-135M, and one large square.
const std::vector<Layer> kLayers = {{"qkv", 576, 960},   {"o", 576, 576},         {"gate_up", 576, 3072},
                                    {"down", 1536, 576}, {"lm_head", 576, 49152}, {"square", 4096, 4096}};
// Weights that take turns where memory is to be measured: together beyond the caches.
constexpr int64_t kColdBytes = int64_t{128} << 20;
constexpr int64_t kStreamedRows = 16;  // up to here a call is expected to read its weights from memory

struct Options {
  std::string isa = "auto";
  std::vector<int64_t> threads = {1, 2};
  std::vector<int64_t> rows = {1, 8, 64, 256, 1024};
  std::vector<std::string> layers;
  std::vector<std::string> stores = {"bf16", "int8", "int4"};
  double seconds = 0.3;
  std::string json;
};

struct Store {
  std::string name;
  WeightType type;
  double (*peak)(int threads, const kvanta::kernels::IsaTable& isa);  // operations per second of its dot
};

const std::vector<Store> kStores = {{"bf16", WeightType::kBf16, kvanta::kernels::MeasureBf16DotPeak},
                                    {"f32", WeightType::kF32, kvanta::kernels::MeasureF32FmaPeak},
                                    {"f16", WeightType::kF16, kvanta::kernels::MeasureF32FmaPeak},
                                    {"int8", WeightType::kInt8, kvanta::kernels::MeasureInt8DotPeak},
                                    {"int4", WeightType::kInt4, kvanta::kernels::MeasureInt8DotPeak}};

struct Limits {
  double read_bytes;  // per second
  double operations;  // per second, of the store's dot
};

std::vector<float> RandomValues(int64_t n, uint32_t seed) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> values(static_cast<size_t>(n));
  for (float& value : values) value = uniform(generator);
  return values;
}

bool HasBlocks(WeightType store) {
  return store == WeightType::kInt8 || store == WeightType::kInt4;
}

// Row x [in] as the product sees it.
std::vector<double> Rounded(const float* x, int64_t in, WeightType store) {
  std::vector<double> values(x, x + in);
  if (store == WeightType::kBf16) {
    for (double& value : values) value = kvanta::Bf16ToFloat(kvanta::FloatToBf16(static_cast<float>(value)));
  }
  for (int64_t begin = 0; HasBlocks(store) && begin < in; begin += kBlockWeights) {
    const int64_t end = std::min(in, begin + kBlockWeights);
    float largest = 0;
    for (int64_t k = begin; k < end; ++k) largest = std::max(largest, std::abs(x[k]));
    for (int64_t k = begin; k < end; ++k) values[k] = std::nearbyint(x[k] * (127 / largest)) * double{largest / 127};
  }
  return values;
}

// Some elements of every row against double on the stored weights; the rows against one row alone, bit by bit. With
// blocks, a row's terms are a code and a minimum, each up to twice the largest weight.
void Verify(const Linear& linear, const std::vector<float>& x, const std::vector<float>& y, int64_t rows,
            WeightType store) {
  const double terms = static_cast<double>(linear.In() + 3) * (HasBlocks(store) ? 4 : 1);
  std::vector<float> w(static_cast<size_t>(linear.In()));
  std::vector<float> alone(static_cast<size_t>(linear.Out()));
  for (int64_t row = 0; row < rows; row += std::max<int64_t>(1, rows / 7)) {
    linear.Forward(x.data() + row * linear.In(), 1, alone.data(), linear.Out());
    if (!std::equal(alone.begin(), alone.end(), y.begin() + row * linear.Out())) {
      throw std::runtime_error(fmt::format("row {} of {} differs from the row alone", row, rows));
    }
    const std::vector<double> values = Rounded(x.data() + row * linear.In(), linear.In(), store);
    for (int64_t column = 0; column < linear.Out(); column += std::max<int64_t>(1, linear.Out() / 61)) {
      linear.ReadRow(column, w.data());
      double sum = 0;
      double magnitude = 0;
      for (int64_t k = 0; k < linear.In(); ++k) {
        sum += values[k] * w[k];
        magnitude += std::abs(values[k] * w[k]);
      }
      const double error = std::abs(alone[column] - sum);
      if (!(error <= terms * 0x1p-24 * magnitude)) {
        throw std::runtime_error(fmt::format("row {}, column {}: {} instead of {}", row, column, alone[column], sum));
      }
    }
  }
}

// Seconds of the fastest call; the copies of the layer take turns.
double TimeCalls(const std::vector<std::unique_ptr<Linear>>& copies, const std::vector<float>& x, int64_t rows,
                 std::vector<float>& y, double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  // A pass over all copies is one sample, so that one lucky copy in the cache counts for nothing.
  double best = 1e9;
  for (int pass = 0; pass < 3 || Clock::now() < end; ++pass) {
    const auto start = Clock::now();
    for (const auto& linear : copies) linear->Forward(x.data(), rows, y.data(), linear->Out());
    const double pass_seconds = std::chrono::duration<double>(Clock::now() - start).count();
    best = std::min(best, pass_seconds / static_cast<double>(copies.size()));
  }
  return best;
}

nlohmann::json Measure(const Options& options, const Store& store, const Layer& layer, int64_t threads,
                       const Limits& limits) {
  const auto pool = std::make_shared<kvanta::ThreadPool>(static_cast<int>(threads));
  const auto ops = kvanta::kernels::MakeCpuOps(pool, options.isa.c_str());
  const auto w = RandomValues(layer.in * layer.out, 1);
  const WeightView view{w.data(), DType::kF32, layer.out, layer.in};
  std::vector<std::unique_ptr<Linear>> copies;
  copies.push_back(ops->MakeLinear({&view, 1}, {}, store.type));
  const int64_t cold_copies = std::max<int64_t>(2, kColdBytes / copies.front()->WeightBytes());

  auto results = nlohmann::json::array();
  for (const int64_t rows : options.rows) {
    const bool streamed = rows <= kStreamedRows;
    const auto wanted = static_cast<size_t>(streamed ? cold_copies : 1);
    while (copies.size() < wanted) copies.push_back(ops->MakeLinear({&view, 1}, {}, store.type));
    copies.resize(wanted);
    const auto x = RandomValues(rows * layer.in, 2);
    std::vector<float> y(static_cast<size_t>(rows * layer.out));
    copies.front()->Forward(x.data(), rows, y.data(), layer.out);
    Verify(*copies.front(), x, y, rows, store.type);

    const double seconds = TimeCalls(copies, x, rows, y, options.seconds);
    const double bytes = static_cast<double>(copies.front()->WeightBytes()) / seconds;
    const double operations = 2.0 * static_cast<double>(rows * layer.in * layer.out) / seconds;
    fmt::print(
        "{:4} {:8} {:5} -> {:5} rows {:5} threads {}: {:6.1f} GB/s {:5.1f} % of memory, {:7.1f} GFLOP/s {:5.1f} % of "
        "peak\n",
        store.name, layer.name, layer.in, layer.out, rows, threads, bytes / 1e9, 100 * bytes / limits.read_bytes,
        operations / 1e9, 100 * operations / limits.operations);
    std::fflush(stdout);
    results.push_back({{"store", store.name},
                       {"layer", layer.name},
                       {"in", layer.in},
                       {"out", layer.out},
                       {"rows", rows},
                       {"threads", threads},
                       {"bytes_per_second", bytes},
                       {"flops", operations},
                       {"share_of_read", bytes / limits.read_bytes},
                       {"share_of_peak", operations / limits.operations}});
  }
  return results;
}

std::vector<std::string> Split(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

std::vector<int64_t> Numbers(const std::string& text) {
  std::vector<int64_t> numbers;
  for (const std::string& part : Split(text)) numbers.push_back(std::stoll(part));
  return numbers;
}

Options Parse(const std::vector<std::string>& words) {
  Options options;
  const std::map<std::string, std::function<void(const std::string&)>> flags = {
      {"--isa", [&](const std::string& v) { options.isa = v; }},
      {"--threads", [&](const std::string& v) { options.threads = Numbers(v); }},
      {"--rows", [&](const std::string& v) { options.rows = Numbers(v); }},
      {"--layers", [&](const std::string& v) { options.layers = Split(v); }},
      {"--stores", [&](const std::string& v) { options.stores = Split(v); }},
      {"--seconds", [&](const std::string& v) { options.seconds = std::stod(v); }},
      {"--json", [&](const std::string& v) { options.json = v; }},
  };
  for (size_t i = 0; i < words.size(); i += 2) {
    const auto flag = flags.find(words[i]);
    if (flag == flags.end() || i + 1 == words.size()) {
      throw std::runtime_error(fmt::format("'{}' is no flag with a value; see the head of linear_bench.cc", words[i]));
    }
    flag->second(words[i + 1]);
  }
  return options;
}

void Run(const Options& options, const std::string& command) {
  const std::string isa = kvanta::kernels::SelectIsa(options.isa).name;
  nlohmann::json report = {{"command", command}, {"isa", isa}};
  auto& results = report["results"] = nlohmann::json::array();
  for (const int64_t threads : options.threads) {
    for (const std::string& name : options.stores) {
      const auto store = std::ranges::find(kStores, name, &Store::name);
      if (store == kStores.end())
        throw std::runtime_error(fmt::format("no store '{}': bf16, f32, f16, int8, int4", name));
      const auto& unit = kvanta::kernels::SelectIsa(isa);
      const int count = static_cast<int>(threads);
      const Limits limits{kvanta::kernels::MeasureReadBandwidth(count, unit), store->peak(count, unit)};
      fmt::print("{}, {}, {} threads: memory {:.1f} GB/s, dot {:.1f} GFLOP/s\n", isa, name, threads,
                 limits.read_bytes / 1e9, limits.operations / 1e9);
      report["limits"].push_back({{"store", name},
                                  {"threads", threads},
                                  {"read_bytes_per_second", limits.read_bytes},
                                  {"flops", limits.operations}});
      for (const Layer& layer : kLayers) {
        if (!options.layers.empty() && std::ranges::find(options.layers, layer.name) == options.layers.end()) continue;
        for (auto& result : Measure(options, *store, layer, threads, limits)) results.push_back(std::move(result));
      }
    }
  }
  if (!options.json.empty()) std::ofstream(options.json) << report.dump(1) << '\n';
}

}  // namespace

int main(int argc, char** argv) {
  try {
    std::string command = "linear_bench";
    const std::vector<std::string> words(argv + 1, argv + argc);
    for (const std::string& word : words) command += " " + word;
    Run(Parse(words), command);
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "error: {}\n", error.what());
    return 1;
  }
}
