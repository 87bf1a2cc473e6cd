// Decode attention on this machine's GPU, as a share of its copy bandwidth measured in the same run. Every format's
// rows are held to the reference before anything is timed.
//
//   gpu_bench [--formats bf16 ...] [--heads 32] [--kv-heads 8] [--head-dim 128] [--shape BATCHxCONTEXT ...] [--json
//   FILE]
//
// One layer. A figure is the median of runs of several launches each; copies and formats take turns. Exit status 77
// where there is no GPU, with what is missing.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "attention/gpu_backend.h"
#include "attention/reference_backend.h"
#include "kvanta/error.h"

namespace {

using kvanta::Buffer;
using kvanta::InputError;
using kvanta::KvScheme;
using kvanta::ResourceError;
using namespace kvanta::attention;  // NOLINT(google-build-using-namespace): this program is about it
namespace cache = kvanta::cache;
namespace formats = kvanta::formats;
using Clock = std::chrono::steady_clock;

constexpr int kPage = 64;
constexpr int kChunk = 2048;  // tokens that are appended at once
constexpr int kLaunches = 10;
constexpr int kRuns = 9;

struct Shape {
  int batch;
  int context;
};
struct Options {
  std::vector<std::string> formats = {
      "bf16", "fp8", "int8", "int4+exact=none", "nvfp4+exact=none", "k=int8,v=int4+exact=none", "int2_g32+exact=none",
      "kivi4"};
  std::vector<Shape> shapes = {{64, 8192}, {1, 131072}};
  LayerAttention layer = {.heads = 32, .kv_heads = 8, .head_dim = 128};
  std::string json;
};

Options ParseArguments(int argc, char** argv) {
  Options options;
  std::string flag;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.starts_with("--")) {
      flag = word;
      if (flag == "--formats") options.formats.clear();
      if (flag == "--shape") options.shapes.clear();
    } else if (flag == "--formats") {
      options.formats.push_back(word);
    } else if (flag == "--heads") {
      options.layer.heads = std::stoi(word);
    } else if (flag == "--kv-heads") {
      options.layer.kv_heads = std::stoi(word);
    } else if (flag == "--head-dim") {
      options.layer.head_dim = std::stoi(word);
    } else if (flag == "--shape" && word.find('x') != std::string::npos) {
      options.shapes.push_back({std::stoi(word), std::stoi(word.substr(word.find('x') + 1))});
    } else if (flag == "--json") {
      options.json = word;
    } else {
      throw InputError(fmt::format("unknown option {} {}", flag, word));
    }
  }
  options.layer.softmax_scale = 1.0F / std::sqrt(static_cast<float>(options.layer.head_dim));
  return options;
}

std::vector<float> Normal(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& x : values) x = normal(random);
  return values;
}

// A cache of `batch` sequences of `context` tokens on the GPU; rows repeat every kChunk tokens.
class FilledCache {
 public:
  FilledCache(const std::shared_ptr<kvanta::kernels::Gpu>& gpu, const std::string& scheme, const LayerAttention& layer,
              Shape shape)
      : gpu_(*gpu),
        layer_(layer),
        shape_(shape),
        layout_(formats::PlanCache({KvScheme::Parse(scheme)}, {{layer.kv_heads, layer.head_dim}}, kPage)),
        store_(gpu->device(), layout_,
               {.budget_bytes = (Pages() + 1) * (layout_.page_bytes + layout_.exact_page_bytes)}),
        backend_(MakeGpuBackend(store_, Config(), gpu)) {
    tables_.resize(static_cast<size_t>(shape.batch));
    for (cache::BlockTable& table : tables_) {
      table.resize(static_cast<size_t>((shape.context + kPage - 1) / kPage));
      for (cache::PageRef& page : table) {
        page.quantized = store_.Allocate(cache::PageKind::kQuantized);
        page.exact = store_.Allocate(cache::PageKind::kExact);  // none where the layout has none
      }
    }
    const auto width = static_cast<size_t>(layer.kv_heads) * static_cast<size_t>(layer.head_dim);
    k_ = Upload(Normal(kChunk * width, 1));
    v_ = Upload(Normal(kChunk * width, 2));
    q_host_ = Normal(static_cast<size_t>(shape.batch) * QueryWidth(), 3);
    q_ = Upload(q_host_);
    out_ = gpu_.device().Allocate(q_host_.size() * sizeof(float));
    Fill(static_cast<int64_t>(width));
  }

  int64_t Bytes() const { return int64_t{shape_.batch} * shape_.context * layout_.page_bytes / kPage; }

  void Launch() { backend_->Run(*plan_, 0, q_.as<float>(), QueryWidth(), out_.as<float>()); }

  // The largest difference from the reference, of rows of which none may be NaN.
  double LargestError() {
    Launch();
    gpu_.Check();
    std::vector<float> out(q_host_.size()), expected(q_host_.size());
    gpu_.device().CopyOut(out.data(), out_.data(), out.size() * sizeof(float));
    const std::unique_ptr<Backend> reference = MakeReferenceBackend(store_, Config());
    const std::vector<SequenceSpan> spans = Decode();
    const std::unique_ptr<Plan> plan = reference->MakePlan({.sequences = spans}, nullptr);
    reference->Run(*plan, 0, q_host_.data(), QueryWidth(), expected.data());
    double largest = 0;
    for (size_t i = 0; i < out.size(); ++i) {
      const double error = std::abs(double{out[i]} - double{expected[i]});
      if (!(error <= largest)) largest = std::isnan(error) ? HUGE_VAL : error;
    }
    return largest;
  }

 private:
  int64_t Pages() const { return int64_t{shape_.batch} * ((shape_.context + kPage - 1) / kPage); }
  int64_t QueryWidth() const { return int64_t{layer_.heads} * layer_.head_dim; }
  BackendConfig Config() const { return {.layers = {layer_}, .scales = {}}; }
  Buffer Upload(const std::vector<float>& values) {
    Buffer buffer = gpu_.device().Allocate(values.size() * sizeof(float));
    gpu_.device().CopyIn(buffer.data(), values.data(), values.size() * sizeof(float));
    return buffer;
  }
  std::vector<SequenceSpan> Decode() const {
    std::vector<SequenceSpan> spans;
    for (const cache::BlockTable& table : tables_) {
      spans.push_back({.start = shape_.context - 1, .tokens = 1, .pages = table.data()});
    }
    return spans;
  }
  void Fill(int64_t width) {
    for (const cache::BlockTable& table : tables_) {
      for (int start = 0; start < shape_.context; start += kChunk) {
        const SequenceSpan span{
            .start = start, .tokens = std::min(kChunk, shape_.context - start), .pages = table.data()};
        plan_ = backend_->MakePlan({.sequences = {&span, 1}}, std::move(plan_));
        backend_->Append(*plan_, 0, k_.as<float>(), v_.as<float>(), width);
      }
    }
    const std::vector<SequenceSpan> spans = Decode();
    plan_ = backend_->MakePlan({.sequences = spans}, std::move(plan_));
  }

  kvanta::kernels::Gpu& gpu_;
  const LayerAttention layer_;
  const Shape shape_;
  const formats::CacheLayout layout_;
  cache::PageStore store_;
  std::unique_ptr<Backend> backend_;
  std::vector<cache::BlockTable> tables_;
  Buffer k_, v_, q_, out_;
  std::vector<float> q_host_;
  std::unique_ptr<Plan> plan_;
};

// Seconds of one launch, of several in a row.
template <class F>
double Time(kvanta::kernels::Gpu& gpu, F launch) {
  gpu.Check();
  const auto start = Clock::now();
  for (int i = 0; i < kLaunches; ++i) launch();
  gpu.Check();
  return std::chrono::duration<double>(Clock::now() - start).count() / kLaunches;
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

void Run(const Options& options) {
  const std::shared_ptr<kvanta::kernels::Gpu> gpu = kvanta::kernels::MakeCudaGpu();
  for (const std::string& format : options.formats) {
    FilledCache cache(gpu, format, options.layer, {3, 1500});
    const double error = cache.LargestError();
    constexpr double kMost = 2e-3;  // of values of standard deviation 1; f16 weights and queries err by 2^-12
    if (!(error < kMost)) throw ResourceError(fmt::format("{}: differs from the reference by {:.3g}", format, error));
    fmt::print("{:<20} largest error {:.2e}\n", format, error);
  }
  constexpr size_t kCopy = size_t{1} << 30;
  const Buffer from = gpu->device().Allocate(kCopy), to = gpu->device().Allocate(kCopy);
  nlohmann::json rows = nlohmann::json::array();
  for (const Shape shape : options.shapes) {
    for (const std::string& format : options.formats) {
      FilledCache cache(gpu, format, options.layer, shape);
      cache.Launch();
      std::vector<double> runs, copies;
      for (int i = 0; i < kRuns; ++i) {
        runs.push_back(Time(*gpu, [&] { cache.Launch(); }));
        copies.push_back(Time(*gpu, [&] { gpu->Copy(to.data(), from.data(), kCopy); }));
      }
      const double copy = 2 * static_cast<double>(kCopy) / Median(copies);  // read and written
      const double read = static_cast<double>(cache.Bytes()) / Median(runs);
      fmt::print("{:>3} x {:<7} {:<20} {:8.1f} us  {:7.1f} GB/s of {:7.1f}: {:5.1f} %\n", shape.batch, shape.context,
                 format, Median(runs) * 1e6, read * 1e-9, copy * 1e-9, 100 * read / copy);
      rows.push_back({{"batch", shape.batch},
                      {"context", shape.context},
                      {"format", format},
                      {"seconds", Median(runs)},
                      {"bytes", cache.Bytes()},
                      {"copy_bytes_per_second", copy},
                      {"share", read / copy}});
    }
  }
  if (!options.json.empty()) std::ofstream(options.json) << rows.dump(1) << '\n';
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = ParseArguments(argc, argv);
    if (const std::string missing = kvanta::kernels::MissingForCuda(); !missing.empty()) {
      fmt::print("skipped: {}\n", missing);
      return 77;
    }
    Run(options);
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "gpu_bench: {}\n", error.what());
    return 1;
  }
}
