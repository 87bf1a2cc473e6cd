// Attention of one layer, of models with sparse attention or compressed entries, on the CPU: the times of a step's
// parts (the indexer's selection, attention to what it chose, to a window and to entries), next to dense attention to
// latents. All layers are timed in turn, so that their ratios do not depend on how busy the machine was. The tokens and
// entries that are chosen are compared with the reference's first, and the bits with those of one thread.
//
//   sparse_attention_bench [--contexts 32768 131072] [--format mla_fp8] [--keys mla_fp8+hadamard] [--rows 1] [--threads
//   2]
//                          [--isa auto] [--runs 15] [--layers V4] [--json FILE]
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "attention/cpu_backend.h"
#include "attention/reference_backend.h"
#include "bench/option_parser.h"
#include "bench/random_values.h"
#include "bench/roofline.h"
#include "cache/kv_cache_spec.h"
#include "cache/page_pool.h"
#include "kernels/cpu/select.h"
#include "kvanta/error.h"

namespace {

using namespace kvanta;             // NOLINT(google-build-using-namespace): this program is about it
using namespace kvanta::attention;  // NOLINT(google-build-using-namespace)

constexpr int kPage = 64;

// A layer of attention at its model's published sizes.
struct LayerKind {
  const char* name;
  int heads = 0, dim = 0;
  int rope_dim = 0;                // of latents; 0: rows are K and V in one
  int top_k = 0, index_heads = 0;  // of an indexer; 0: there is none
  int row_tokens = 1;              // of an entry
  int window = 0;                  // 0: all tokens

  bool HasLatents() const { return rope_dim != 0; }
  bool HasEntries() const { return row_tokens != 1; }
  // Layers of the cache: rows or latents, entries, keys.
  int Entries() const { return HasEntries() ? 1 : -1; }
  int Keys() const { return HasEntries() ? 2 : 1; }
};
constexpr int kIndexDim = 128;
constexpr LayerKind kLayers[] = {
    {.name = "DeepSeek V3 (dense)", .heads = 128, .dim = 512, .rope_dim = 64},
    {.name = "DeepSeek V3.2", .heads = 128, .dim = 512, .rope_dim = 64, .top_k = 2048, .index_heads = 64},
    {.name = "DeepSeek V4, window", .heads = 64, .dim = 512, .window = 128},
    {.name = "DeepSeek V4, entries of 4",
     .heads = 64,
     .dim = 512,
     .top_k = 512,
     .index_heads = 64,
     .row_tokens = 4,
     .window = 128},
    {.name = "DeepSeek V4, entries of 128", .heads = 64, .dim = 512, .row_tokens = 128, .window = 128},
};

struct Options {
  std::vector<int64_t> contexts = {131072};
  int64_t rows = 1, threads = 2, runs = 15;
  std::string format = "mla_fp8", keys = "mla_fp8+hadamard", isa = "auto", layers, json;
};

double Seconds(const auto& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The fastest run: others may use the machine.
double Fastest(const std::vector<double>& seconds) {
  return *std::ranges::min_element(seconds);
}

// The cache of a layer with all tokens of the context, and a step of its last rows.
class LayerBench {
 public:
  LayerBench(const LayerKind& kind, const Options& options, int64_t context)
      : kind_(kind), options_(options), context_(context) {
    std::vector<KvScheme> schemes = {KvScheme::Parse(options.format, true)};
    std::vector<formats::LayerShape> shapes = {
        {.kv_heads = 1, .head_dim = kind.dim, .rope_dim = kind.rope_dim, .shared_kv = !kind.HasLatents()}};
    config_.layers = {{.heads = kind.heads,
                       .kv_heads = 1,
                       .head_dim = kind.dim,
                       .rope_dim = kind.rope_dim,
                       .index_topk = kind.top_k,
                       .entries_layer = kind.Entries(),
                       .softmax_scale = 0.04F}};
    if (kind.window != 0) config_.layers[0].visibility = cache::SlidingWindow(kind.window);
    if (kind.HasEntries()) {
      schemes.push_back(schemes[0]);
      shapes.push_back({.kv_heads = 1, .head_dim = kind.dim, .shared_kv = true, .row_tokens = kind.row_tokens});
      config_.layers.push_back({.heads = 1, .kv_heads = 1, .head_dim = kind.dim, .softmax_scale = 1});
    }
    if (kind.top_k != 0) {
      schemes.push_back(KvScheme::Parse(options.keys, true));
      shapes.push_back({.kv_heads = 1, .head_dim = kIndexDim, .keys_only = true, .row_tokens = kind.row_tokens});
      config_.layers.push_back({.heads = kind.index_heads,
                                .kv_heads = 1,
                                .head_dim = kIndexDim,
                                .index_topk = kind.top_k,
                                .softmax_scale = 1});
    }
    std::vector<int> groups;
    for (size_t layer = 0; layer < shapes.size(); ++layer) groups.push_back(static_cast<int>(layer));
    layout_ = formats::PlanCache(schemes, shapes, kPage, groups);
    const int64_t pages = context / kPage;
    int64_t page_bytes = 0;
    for (const auto& group : layout_.groups) page_bytes += group.page_bytes + layout_.exact_page_bytes;
    pool_.emplace(Cpu(), layout_,
                  cache::PagePoolConfig{.budget_bytes = (pages + 1) * page_bytes, .poison_unused = false});
    tables_.resize(shapes.size());
    for (size_t group = 0; group < tables_.size(); ++group) {
      for (int64_t page = 0; page < pages; ++page) {
        cache::PageRef& ref = tables_[group].emplace_back();
        ref.quantized = pool_->Allocate(static_cast<int>(group), cache::PageKind::kQuantized);
        if (layout_.layers[group].exact_open) {
          ref.exact = pool_->Allocate(static_cast<int>(group), cache::PageKind::kExact);
        }
      }
      table_data_.push_back(tables_[group].data());
    }
    const int64_t rows = options.rows;
    q_ = NormalValues(rows * QueryWidth(), 1, 1);
    index_q_ = NormalValues(rows * kind.index_heads * kIndexDim, 2, 1);
    weights_ = NormalValues(rows * kind.index_heads, 3, 1);
    out_.resize(static_cast<size_t>(rows * kind.heads * kind.dim));
    backend_ = MakeBackend(static_cast<int>(options.threads));
    Fill();
    plan_ = MakePlan(*backend_);
    Verify();
  }

  void Time() {
    if (kind_.top_k != 0) select_.push_back(Seconds([&] { Select(*backend_, *plan_); }));
    attend_.push_back(Seconds([&] { Attend(*backend_, *plan_); }));
  }

  const LayerKind& kind() const { return kind_; }
  double SelectSeconds() const { return select_.empty() ? 0 : Fastest(select_); }
  double AttendSeconds() const { return Fastest(attend_); }
  // Products of queries and keys that the indexer needs, and of queries, keys and values that attention does.
  double SelectProducts() const { return kind_.top_k == 0 ? 0 : Rows() * Keys() * kind_.index_heads * kIndexDim; }
  double AttendProducts() const {
    const double entries = kind_.HasEntries() ? Keys() : 0;
    double tokens = kind_.window != 0 ? kind_.window : static_cast<double>(context_);
    if (kind_.HasEntries()) tokens += kind_.top_k == 0 ? entries : std::min<double>(entries, kind_.top_k);
    if (kind_.HasLatents() && kind_.top_k != 0) tokens = std::min<double>(tokens, kind_.top_k);
    return Rows() * tokens * kind_.heads * (2 * kind_.dim + kind_.rope_dim);
  }

 private:
  double Rows() const { return static_cast<double>(options_.rows); }
  double Keys() const { return static_cast<double>(context_ / kind_.row_tokens); }
  int64_t QueryWidth() const { return int64_t{kind_.heads} * (kind_.dim + kind_.rope_dim); }
  std::unique_ptr<Backend> MakeBackend(int threads) {
    return MakeCpuBackend(*pool_, config_, std::make_shared<ThreadPool>(threads), options_.isa.c_str());
  }

  // Writes all tokens. Entries and their keys are read from the rows of their last tokens.
  void Fill() {
    constexpr int64_t kChunk = 1024;
    std::unique_ptr<attention::Plan> plan;
    for (int64_t start = 0; start < context_; start += kChunk) {
      const auto tokens = static_cast<int>(std::min(kChunk, context_ - start));
      const SequenceSpan span{.start = start, .tokens = tokens, .pages = table_data_.data()};
      plan = backend_->MakePlan({.sequences = {&span, 1}}, std::move(plan));
      auto seed = static_cast<uint32_t>(start + 10);
      for (size_t layer = 0; layer < config_.layers.size(); ++layer) {
        const int width = config_.layers[layer].head_dim + config_.layers[layer].rope_dim;
        backend_->Append(*plan, static_cast<int>(layer), NormalValues(int64_t{tokens} * width, seed++, 1).data(),
                         nullptr, width);
      }
    }
  }

  std::unique_ptr<attention::Plan> MakePlan(Backend& backend) {
    const SequenceSpan span{
        .start = context_ - options_.rows, .tokens = static_cast<int>(options_.rows), .pages = table_data_.data()};
    return backend.MakePlan({.sequences = {&span, 1}}, nullptr);
  }
  void Select(Backend& backend, attention::Plan& plan) {
    backend.Select(plan, kind_.Keys(), index_q_.data(), int64_t{kind_.index_heads} * kIndexDim, weights_.data());
  }
  void Attend(Backend& backend, attention::Plan& plan) { backend.Run(plan, 0, q_.data(), QueryWidth(), out_.data()); }

  void Verify() {
    const auto serial = MakeBackend(1);
    const auto serial_plan = MakePlan(*serial);
    const int64_t last = options_.rows - 1;
    if (kind_.top_k != 0) {
      Select(*backend_, *plan_);
      Select(*serial, *serial_plan);
      const auto chosen = backend_->Selected(*plan_, last);
      if (!std::ranges::equal(chosen, serial->Selected(*serial_plan, last))) Fail("chosen tokens");
      if (kind_.HasLatents()) VerifyChoice(chosen);
    }
    Attend(*backend_, *plan_);
    const std::vector<float> out = out_;
    Attend(*serial, *serial_plan);
    if (std::memcmp(out.data(), out_.data(), out.size() * sizeof(float)) != 0) Fail("bits");
  }
  // The reference has no compressed entries.
  void VerifyChoice(std::span<const int32_t> chosen) {
    const auto reference = MakeReferenceBackend(*pool_, config_);
    const SequenceSpan span{.start = context_ - 1, .tokens = 1, .pages = table_data_.data()};
    const auto plan = reference->MakePlan({.sequences = {&span, 1}}, nullptr);
    const int64_t last = options_.rows - 1, width = int64_t{kind_.index_heads} * kIndexDim;
    reference->Select(*plan, kind_.Keys(), index_q_.data() + last * width, width,
                      weights_.data() + last * kind_.index_heads);
    const auto expected = reference->Selected(*plan, 0);
    std::vector<int32_t> both;
    std::ranges::set_intersection(chosen, expected, std::back_inserter(both));
    const double share = static_cast<double>(both.size()) / static_cast<double>(expected.size());
    if (share < 0.98) throw Error(fmt::format("{:.3f} of the tokens chosen are the reference's", share));
  }
  void Fail(const char* what) const {
    throw Error(fmt::format("{}: the {} are not those of one thread", kind_.name, what));
  }

  const LayerKind& kind_;
  const Options& options_;
  const int64_t context_;
  BackendConfig config_;
  formats::CacheLayout layout_;
  std::optional<cache::PagePool> pool_;
  std::vector<std::vector<cache::PageRef>> tables_;
  std::vector<const cache::PageRef*> table_data_;
  std::vector<float> q_, index_q_, weights_, out_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<attention::Plan> plan_;
  std::vector<double> select_, attend_;
};

// Times all layers, and returns their figures.
nlohmann::ordered_json Run(const Options& options, int64_t context) {
  std::vector<std::unique_ptr<LayerBench>> layers;
  for (const LayerKind& kind : kLayers) {
    if (std::string_view(kind.name).find(options.layers) == std::string_view::npos) continue;
    layers.push_back(std::make_unique<LayerBench>(kind, options, context));
  }
  if (layers.empty()) throw Error(fmt::format("--layers {}: no layer's name has that", options.layers));
  const kernels::IsaTable& isa = kernels::SelectIsa(options.isa);
  kernels::DotLimit limit(static_cast<int>(options.threads), isa);
  double rate = 0;
  for (int64_t run = 0; run < options.runs; ++run) {
    for (const auto& layer : layers) layer->Time();
    rate = std::max(rate, limit.Now(kernels::Dot::kFp8));
  }
  const double first = layers[0]->SelectSeconds() + layers[0]->AttendSeconds();
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  fmt::print("{} tokens, {} rows, {}, keys {}, {} threads ({}), {:.1f} G products/s\n", context, options.rows,
             options.format, options.keys, options.threads, isa.name, rate / 1e9);
  for (const auto& layer : layers) {
    const double select = layer->SelectSeconds(), attend = layer->AttendSeconds();
    const double select_share = select == 0 ? 0 : layer->SelectProducts() / select / rate;
    const double attend_share = layer->AttendProducts() / attend / rate;
    fmt::print(
        "{:28} selection {:8.3f} ms ({:3.0f} % of the arithmetic), attention {:8.3f} ms ({:3.0f} %), {:.4f} of the "
        "first\n",
        layer->kind().name, 1e3 * select, 100 * select_share, 1e3 * attend, 100 * attend_share,
        (select + attend) / first);
    const auto share = [](double value) {
      return value == 0 ? nlohmann::ordered_json() : nlohmann::ordered_json(value);
    };
    rows.push_back({{"layer", layer->kind().name},
                    {"rows", options.rows},
                    {"context", context},
                    {"select_ms", 1e3 * select},
                    {"select_share", share(select_share)},
                    {"attend_ms", 1e3 * attend},
                    {"attend_share", attend_share},
                    {"of_first", (select + attend) / first}});
  }
  return rows;
}

void Run(const Options& options) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const int64_t context : options.contexts) {
    for (auto& row : Run(options, context)) rows.push_back(std::move(row));
  }
  if (options.json.empty()) return;
  const nlohmann::ordered_json report = {{"format", options.format},
                                         {"keys", options.keys},
                                         {"threads", options.threads},
                                         {"isa", kernels::SelectIsa(options.isa).name},
                                         {"layers", std::move(rows)}};
  std::ofstream(options.json) << report.dump(1) << "\n";
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Options options;
    OptionParser parser;
    parser.Option("--contexts", options.contexts);
    parser.Option("--rows", options.rows);
    parser.Option("--threads", options.threads);
    parser.Option("--runs", options.runs);
    parser.Option("--format", options.format);
    parser.Option("--keys", options.keys);
    parser.Option("--isa", options.isa);
    parser.Option("--layers", options.layers);
    parser.Option("--json", options.json);
    parser.Parse(argc, argv);
    Run(options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "error: {}\n", error.what());
    return 1;
  }
  return 0;
}
