#include "bench/gpu_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "attention/gpu_backend.h"
#include "attention/reference_backend.h"
#include "base/math.h"
#include "bench/random_values.h"
#include "kvanta/error.h"

namespace kvanta::attention {
namespace {

constexpr int64_t kChunk = 2048;  // tokens appended at once
constexpr int kMinRuns = 9;
constexpr int64_t kVerifiedContext = 1500;  // the reference is slow: double precision, row by row
constexpr int kVerifiedBatch = 3;
constexpr int kVerifiedQueryTokens = 40;
constexpr double kMaxError = 2e-3;  // for values of standard deviation 1; queries and probabilities are f16, 2^-12

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Attention parameters from the options; formats for MLA only use the shape of DeepSeek V2 and V3.
AttentionSpec LayerOf(const AttentionBench& options, const std::string& scheme) {
  AttentionSpec layer{.heads = options.heads, .kv_heads = options.kv_heads, .head_dim = options.head_dim};
  if (formats::Find(KvScheme::Parse(scheme).k.format).latents == formats::MlaSupport::kRequired) {
    layer.kv_heads = 1;
    layer.head_dim = 512;
    layer.rope_dim = 64;
  }
  layer.softmax_scale = 1.0F / std::sqrt(static_cast<float>(layer.KeyDim()));
  return layer;
}

// Cache of `batch` sequences of `context` tokens on the GPU, and queries after them; rows repeat every kChunk tokens.
class FilledCache {
 public:
  FilledCache(const std::shared_ptr<kernels::CudaContext>& gpu, const std::string& scheme,
              const AttentionBench& options)
      : gpu_(*gpu),
        options_(options),
        layer_(LayerOf(options, scheme)),
        layout_(formats::PlanCache({KvScheme::Parse(scheme)}, {{layer_.kv_heads, layer_.head_dim, layer_.rope_dim}},
                                   options.page_size)),
        store_(gpu->device(), layout_,
               {.budget_bytes = (options.batch * Pages() + 1) * (layout_.page_bytes + layout_.exact_page_bytes),
                .poison_unused = false}),
        backend_(MakeGpuBackend(store_, Config(), gpu)) {
    tables_.resize(static_cast<size_t>(options.batch));
    for (cache::BlockTable& table : tables_) {
      table.resize(static_cast<size_t>(Pages()));
      for (cache::PageRef& page : table) {
        page.quantized = store_.Allocate(0, cache::PageKind::kQuantized);
        page.exact = store_.Allocate(0, cache::PageKind::kExact);  // none where the layout has none
      }
      table_data_.push_back(table.data());
    }
    const auto width = static_cast<size_t>(KvWidth());
    k_ = Upload(NormalValues(kChunk * width, 1));
    v_ = Upload(NormalValues(kChunk * width, 2));
    q_host_ = NormalValues(QueryRows() * QueryWidth(), 3);
    q_ = Upload(q_host_);
    out_ = gpu_.device().Allocate(static_cast<size_t>(QueryRows() * OutWidth()) * sizeof(float));
    Fill();
  }

  int64_t Bytes() const {
    return options_.batch * (options_.context + options_.query_tokens) * layout_.page_bytes / options_.page_size;
  }

  void Launch() { backend_->Run(*plan_, 0, q_.as<float>(), QueryWidth(), out_.as<float>()); }

  // Maximum difference from the reference; infinite if an output is NaN.
  double MaxError() {
    Launch();
    gpu_.device().Synchronize();
    std::vector<float> out(out_.bytes() / sizeof(float)), expected(out.size());
    gpu_.device().CopyOut(out.data(), out_.data(), out_.bytes());
    const std::unique_ptr<Backend> reference = MakeReferenceBackend(store_, Config());
    const std::vector<SequenceSpan> spans = Queries();
    const std::unique_ptr<Plan> plan = reference->MakePlan({.sequences = spans}, nullptr);
    reference->Run(*plan, 0, q_host_.data(), QueryWidth(), expected.data());
    double max_error = 0;
    for (size_t i = 0; i < out.size(); ++i) {
      const double error = std::abs(double{out[i]} - double{expected[i]});
      if (!(error <= max_error)) max_error = std::isnan(error) ? HUGE_VAL : error;
    }
    return max_error;
  }

 private:
  int64_t Tokens() const { return options_.context + options_.query_tokens; }
  int64_t Pages() const { return CeilDiv(Tokens(), options_.page_size); }
  int64_t QueryRows() const { return int64_t{options_.batch} * options_.query_tokens; }
  int64_t QueryWidth() const { return int64_t{layer_.heads} * layer_.KeyDim(); }
  int64_t OutWidth() const { return int64_t{layer_.heads} * layer_.head_dim; }
  int64_t KvWidth() const { return int64_t{layer_.kv_heads} * layer_.KeyDim(); }
  BackendConfig Config() const { return {.layers = {layer_}, .scales = {}}; }
  Buffer Upload(const std::vector<float>& values) {
    Buffer buffer = gpu_.device().Allocate(values.size() * sizeof(float));
    gpu_.device().CopyIn(buffer.data(), values.data(), values.size() * sizeof(float));
    return buffer;
  }
  std::vector<SequenceSpan> Queries() const {
    std::vector<SequenceSpan> spans;
    for (const cache::PageRef* const& table : table_data_) {
      spans.push_back({.start = options_.context, .tokens = options_.query_tokens, .pages = &table});
    }
    return spans;
  }
  void Fill() {
    for (const cache::PageRef* const& table : table_data_) {
      for (int64_t start = 0; start < Tokens(); start += kChunk) {
        const SequenceSpan span{
            .start = start, .tokens = static_cast<int>(std::min(kChunk, Tokens() - start)), .pages = &table};
        plan_ = backend_->MakePlan({.sequences = {&span, 1}}, std::move(plan_));
        backend_->Append(*plan_, 0, k_.as<float>(), v_.as<float>(), KvWidth());
      }
    }
    const std::vector<SequenceSpan> spans = Queries();
    plan_ = backend_->MakePlan({.sequences = spans}, std::move(plan_));
  }

  kernels::CudaContext& gpu_;
  const AttentionBench options_;
  const AttentionSpec layer_;
  const formats::CacheLayout layout_;
  cache::PagePool store_;
  std::unique_ptr<Backend> backend_;
  std::vector<cache::BlockTable> tables_;
  std::vector<const cache::PageRef*> table_data_;
  Buffer k_, v_, q_, out_;
  std::vector<float> q_host_;
  std::unique_ptr<Plan> plan_;
};

double Verify(const std::shared_ptr<kernels::CudaContext>& gpu, const std::string& format, AttentionBench options) {
  options.batch = std::min(options.batch, kVerifiedBatch);
  options.context = std::min(options.context, kVerifiedContext);
  options.query_tokens = std::min(options.query_tokens, kVerifiedQueryTokens);
  const double error = FilledCache(gpu, format, options).MaxError();
  if (!(error < kMaxError)) throw Error(fmt::format("bench: {} differs from the reference by {:.3g}", format, error));
  return error;
}

}  // namespace

std::vector<GpuBenchRow> RunGpuBench(const AttentionBench& options, const std::shared_ptr<kernels::CudaContext>& gpu,
                                     size_t flush_bytes, const std::function<void()>& measured) {
  std::vector<double> errors;
  for (const std::string& format : options.formats) errors.push_back(Verify(gpu, format, options));
  Device& device = gpu->device();
  const Buffer from = device.Allocate(flush_bytes), to = device.Allocate(flush_bytes);
  std::vector<GpuBenchRow> rows;
  for (const std::string& format : options.formats) {
    FilledCache cache(gpu, format, options);
    cache.Launch();
    std::vector<double> runs, copies;
    double total = 0;
    for (int run = 0; run < kMinRuns || total < options.seconds; ++run) {
      // The copy also evicts the cache pages from L2.
      const auto copy = [&] { gpu->Copy(to.data(), from.data(), flush_bytes); };
      copies.push_back(gpu->Seconds(copy, copy));
      runs.push_back(gpu->Seconds(copy, [&] { cache.Launch(); }));
      total += runs.back() + copies.back();
    }
    gpu->device().Synchronize();
    GpuBenchRow row{.format = format,
                    .unit = gpu->Name(),
                    .batch = options.batch,
                    .context = options.context,
                    .query_tokens = options.query_tokens,
                    .bytes = cache.Bytes()};
    row.ns_min = *std::min_element(runs.begin(), runs.end()) * 1e9;
    row.ns_median = Median(std::move(runs)) * 1e9;
    row.copy_gb_s = 2 * static_cast<double>(flush_bytes) / Median(std::move(copies)) * 1e-9;
    row.gb_s = static_cast<double>(row.bytes) / row.ns_median;
    row.share_of_limit = row.gb_s / row.copy_gb_s;
    row.max_error = errors[rows.size()];
    rows.push_back(std::move(row));
    if (measured) measured();
  }
  return rows;
}

}  // namespace kvanta::attention
