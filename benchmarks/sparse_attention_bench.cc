// A decode step of one layer of sparse attention (DeepSeek V3.2's shape) on the CPU: time of the indexer's selection
// and of attention to the chosen tokens, next to dense attention on the same cache. The chosen tokens are compared with
// the reference's first, and the bits with those of one thread.
//
//   sparse_attention_bench [--context 131072] [--latents mla_fp8] [--keys mla_fp8+hadamard] [--heads 128]
//                          [--index-heads 64] [--top-k 2048] [--rows 1] [--threads 2] [--isa auto]
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "attention/cpu_backend.h"
#include "attention/reference_backend.h"
#include "bench/option_parser.h"
#include "bench/random_values.h"
#include "bench/roofline.h"
#include "cache/page_pool.h"
#include "kernels/cpu/select.h"
#include "kvanta/error.h"

namespace {

using namespace kvanta;             // NOLINT(google-build-using-namespace): this program is about it
using namespace kvanta::attention;  // NOLINT(google-build-using-namespace)

constexpr int kRank = 512, kRope = 64, kIndexDim = 128, kPage = 64;
constexpr int kLatents = 0, kKeys = 1;  // layers and groups
constexpr int kRuns = 15;

struct Options {
  std::map<std::string, int64_t> numbers = {{"--context", 131072}, {"--heads", 128}, {"--index-heads", 64},
                                            {"--top-k", 2048},     {"--rows", 1},    {"--threads", 2}};
  std::string latents = "mla_fp8", keys = "mla_fp8+hadamard", isa = "auto";

  int64_t operator[](const char* name) const { return numbers.at(name); }
};

// Rows of a step: queries, queries of the indexer, weights of its heads.
struct Rows {
  std::vector<float> q, index_q, weights;
};

double Seconds(const auto& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

class Bench {
 public:
  explicit Bench(const Options& options)
      : options_(options),
        layout_(formats::PlanCache({KvScheme::Parse(options.latents, true), KvScheme::Parse(options.keys, true)},
                                   {{.kv_heads = 1, .head_dim = kRank, .rope_dim = kRope},
                                    {.kv_heads = 1, .head_dim = kIndexDim, .keys_only = true}},
                                   kPage, {kLatents, kKeys})),
        pages_(options["--context"] / kPage),
        pool_(
            Cpu(), layout_,
            {.budget_bytes = (pages_ + 1) * (layout_.page_bytes + layout_.exact_page_bytes), .poison_unused = false}) {
    const int64_t context = options["--context"];
    for (const int group : {kLatents, kKeys}) {
      std::vector<cache::PageRef>& table = tables_[static_cast<size_t>(group)];
      for (int64_t page = 0; page < pages_; ++page) {
        cache::PageRef& ref = table.emplace_back();
        ref.quantized = pool_.Allocate(group, cache::PageKind::kQuantized);
        if (layout_.layers[static_cast<size_t>(group)].exact_open) {
          ref.exact = pool_.Allocate(group, cache::PageKind::kExact);
        }
      }
      table_data_[static_cast<size_t>(group)] = table.data();
    }
    const int64_t rows = options["--rows"], heads = options["--heads"], index_heads = options["--index-heads"];
    rows_ = {.q = NormalValues(rows * heads * (kRank + kRope), 1, 1),
             .index_q = NormalValues(rows * index_heads * kIndexDim, 2, 1),
             .weights = NormalValues(rows * index_heads, 3, 1)};
    Fill(context);
  }

  void Run() {
    const auto threads = static_cast<int>(options_["--threads"]);
    const auto dense = MakeBackend(static_cast<int>(options_["--context"]), threads);
    const auto sparse = MakeBackend(static_cast<int>(options_["--top-k"]), threads);
    const auto serial = MakeBackend(static_cast<int>(options_["--top-k"]), 1);
    Verify(*sparse, *serial);
    std::vector<double> dense_times, select_times, attend_times, read_rates;
    kernels::ReadLimit read(threads, kernels::SelectIsa(options_.isa));
    auto dense_plan = Plan(*dense), sparse_plan = Plan(*sparse);
    for (int run = 0; run < kRuns; ++run) {
      dense_times.push_back(Seconds([&] { Attend(*dense, *dense_plan); }));
      select_times.push_back(Seconds([&] { Select(*sparse, *sparse_plan); }));
      attend_times.push_back(Seconds([&] { Attend(*sparse, *sparse_plan); }));
      read_rates.push_back(read.Now());
    }
    const double all = Median(dense_times), select = Median(select_times), attend = Median(attend_times);
    const double reads = Median(read_rates);
    const auto bytes = [&](int layer) {
      return static_cast<double>(pages_ * layout_.groups[static_cast<size_t>(layer)].page_bytes);
    };
    fmt::print("{} tokens, {} rows, {} heads, latents {}, keys {} of {} heads, {} threads ({}), reads {:.1f} GB/s\n",
               options_["--context"], options_["--rows"], options_["--heads"], options_.latents, options_.keys,
               options_["--index-heads"], threads, sparse->Info().name, reads / 1e9);
    fmt::print(
        "dense {:.2f} ms ({:.0f} % of the bandwidth); selection {:.2f} ms ({:.0f} %), attention {:.2f} ms; "
        "sparse / dense {:.3f}\n",
        1e3 * all, 100 * bytes(kLatents) / all / reads, 1e3 * select, 100 * bytes(kKeys) / select / reads, 1e3 * attend,
        (select + attend) / all);
  }

 private:
  BackendConfig Config(int top_k) const {
    return {.layers = {{.heads = static_cast<int>(options_["--heads"]),
                        .kv_heads = 1,
                        .head_dim = kRank,
                        .rope_dim = kRope,
                        .index_topk = top_k,
                        .softmax_scale = 0.04F},
                       {.heads = static_cast<int>(options_["--index-heads"]),
                        .kv_heads = 1,
                        .head_dim = kIndexDim,
                        .index_topk = top_k,
                        .softmax_scale = 1}},
            .scales = {}};
  }
  std::unique_ptr<Backend> MakeBackend(int top_k, int threads) {
    return MakeCpuBackend(pool_, Config(top_k), std::make_shared<ThreadPool>(threads), options_.isa.c_str());
  }

  // Writes all tokens.
  void Fill(int64_t context) {
    const auto backend = MakeBackend(static_cast<int>(options_["--top-k"]), static_cast<int>(options_["--threads"]));
    constexpr int64_t kChunk = 1024;
    std::unique_ptr<attention::Plan> plan;
    for (int64_t start = 0; start < context; start += kChunk) {
      const auto tokens = static_cast<int>(std::min(kChunk, context - start));
      const SequenceSpan span{.start = start, .tokens = tokens, .pages = table_data_.data()};
      plan = backend->MakePlan({.sequences = {&span, 1}}, std::move(plan));
      const auto seed = static_cast<uint32_t>(start + 10);
      backend->Append(*plan, kLatents, NormalValues(tokens * (kRank + kRope), seed, 1).data(), nullptr, kRank + kRope);
      backend->Append(*plan, kKeys, NormalValues(tokens * kIndexDim, seed + 1, 1).data(), nullptr, kIndexDim);
    }
  }

  std::unique_ptr<attention::Plan> Plan(Backend& backend) {
    const int64_t rows = options_["--rows"];
    const SequenceSpan span{
        .start = options_["--context"] - rows, .tokens = static_cast<int>(rows), .pages = table_data_.data()};
    return backend.MakePlan({.sequences = {&span, 1}}, nullptr);
  }
  void Select(Backend& backend, attention::Plan& plan) {
    backend.Select(plan, kKeys, rows_.index_q.data(), options_["--index-heads"] * kIndexDim, rows_.weights.data());
  }
  void Attend(Backend& backend, attention::Plan& plan) {
    out_.resize(static_cast<size_t>(options_["--rows"] * options_["--heads"] * kRank));
    backend.Run(plan, kLatents, rows_.q.data(), options_["--heads"] * (kRank + kRope), out_.data());
  }

  void Verify(Backend& backend, Backend& serial) {
    const auto plan = Plan(backend), serial_plan = Plan(serial);
    Select(backend, *plan);
    Select(serial, *serial_plan);
    const int64_t last = options_["--rows"] - 1;
    const auto reference = MakeReferenceBackend(pool_, Config(static_cast<int>(options_["--top-k"])));
    const SequenceSpan span{.start = options_["--context"] - 1, .tokens = 1, .pages = table_data_.data()};
    const auto reference_plan = reference->MakePlan({.sequences = {&span, 1}}, nullptr);
    const int64_t width = options_["--index-heads"] * kIndexDim;
    reference->Select(*reference_plan, kKeys, rows_.index_q.data() + last * width, width,
                      rows_.weights.data() + last * options_["--index-heads"]);
    const auto chosen = backend.Selected(*plan, last), expected = reference->Selected(*reference_plan, 0);
    std::vector<int32_t> both;
    std::ranges::set_intersection(chosen, expected, std::back_inserter(both));
    const double share = static_cast<double>(both.size()) / static_cast<double>(expected.size());
    if (share < 0.98) throw Error(fmt::format("{:.3f} of the tokens chosen are the reference's", share));
    Attend(backend, *plan);
    const std::vector<float> out = out_;
    Attend(serial, *serial_plan);
    if (!std::ranges::equal(chosen, serial.Selected(*serial_plan, last)) ||
        std::memcmp(out.data(), out_.data(), out.size() * sizeof(float)) != 0) {
      throw Error("the bits are not those of one thread");
    }
  }

  const Options& options_;
  const formats::CacheLayout layout_;
  const int64_t pages_;
  cache::PagePool pool_;
  std::array<std::vector<cache::PageRef>, 2> tables_;
  std::array<const cache::PageRef*, 2> table_data_ = {};
  Rows rows_;
  std::vector<float> out_;
};

}  // namespace

int main(int argc, char** argv) {
  try {
    Options options;
    OptionParser parser;
    for (auto& [name, number] : options.numbers) parser.Option(name, number);
    parser.Option("--latents", options.latents);
    parser.Option("--keys", options.keys);
    parser.Option("--isa", options.isa);
    parser.Parse(argc, argv);
    Bench(options).Run();
  } catch (const std::exception& error) {
    fmt::print(stderr, "error: {}\n", error.what());
    return 1;
  }
  return 0;
}
