#include "observe/kv_observer.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <vector>

#include "cache/sequence_cache.h"
#include "kvanta/error.h"
#include "observe/forwarding_backend.h"
#include "runner/runner.h"

namespace kvanta::observe {
namespace {

// Passes appended rows, and queries, to an observer first.
class ObservedBackend final : public ForwardingBackend {
 public:
  ObservedBackend(std::unique_ptr<attention::Backend> inner, kernels::Ops& ops,
                  const std::vector<formats::LayerScheme>& layers, std::vector<attention::AttentionSpec> attention,
                  KvObserver& observer)
      : ForwardingBackend(std::move(inner)),
        ops_(ops),
        layers_(layers),
        attention_(std::move(attention)),
        observer_(observer) {}

  std::unique_ptr<attention::Plan> MakePlan(const attention::BatchShape& batch,
                                            std::unique_ptr<attention::Plan> plan) override {
    rows_ = 0;
    for (const attention::SequenceSpan& span : batch.sequences) rows_ += span.tokens;
    return ForwardingBackend::MakePlan(batch, std::move(plan));
  }
  void Append(attention::Plan& plan, int layer, const float* k, const float* v, int64_t kv_stride) noexcept override {
    if (ops_.OnHost()) {
      observer_.OnAppend(layer, k, v, kv_stride, rows_);
    } else {
      ObserveCopies(layer, k, v, kv_stride);
    }
    ForwardingBackend::Append(plan, layer, k, v, kv_stride);
  }
  void Run(attention::Plan& plan, int layer, const float* q, int64_t q_stride, float* out,
           const kernels::Linear* reader) noexcept override {
    if (observer_.ObservesQueries()) {
      if (ops_.OnHost()) {
        observer_.OnRun(layer, q, q_stride, rows_);
      } else {
        ObserveQueryCopies(layer, q, q_stride);
      }
    }
    ForwardingBackend::Run(plan, layer, q, q_stride, out, reader);
  }

  // Throws the error that kept rows from the observer.
  void Check() const {
    if (failed_) std::rethrow_exception(failed_);
  }

 private:
  // Copies each side densely first: one transfer instead of one per row.
  void ObserveCopies(int layer, const float* k, const float* v, int64_t stride) noexcept {
    if (failed_) return;
    try {
      const formats::LayerScheme& scheme = layers_[static_cast<size_t>(layer)];
      const int64_t width = int64_t{scheme.kv_heads} * scheme.shape.head_dim;
      CopyRows(k, stride, width, k_);
      CopyRows(v, stride, width, v_);
      observer_.OnAppend(layer, k_.data(), v_.data(), width, rows_);
    } catch (...) {  // Append may not throw
      failed_ = std::current_exception();
    }
  }

  void ObserveQueryCopies(int layer, const float* q, int64_t stride) noexcept {
    if (failed_) return;
    try {
      const attention::AttentionSpec& spec = attention_[static_cast<size_t>(layer)];
      const int64_t width = int64_t{spec.heads} * spec.KeyDim();
      CopyRows(q, stride, width, k_);
      observer_.OnRun(layer, k_.data(), width, rows_);
    } catch (...) {  // Run may not throw
      failed_ = std::current_exception();
    }
  }

  void CopyRows(const float* rows, int64_t stride, int64_t width, std::vector<float>& to) {
    to.resize(static_cast<size_t>(rows_ * width));
    const size_t bytes = to.size() * sizeof(float);
    if (dense_.bytes() < bytes) dense_ = ops_.device().Allocate(bytes);
    ops_.Copy(rows, stride, rows_, width, dense_.as<float>(), width);
    ops_.device().CopyOut(to.data(), dense_.data(), bytes);
  }

  kernels::Ops& ops_;
  const std::vector<formats::LayerScheme>& layers_;
  const std::vector<attention::AttentionSpec> attention_;
  KvObserver& observer_;
  int64_t rows_ = 0;
  // For a device whose memory the host cannot read: dense rows there, and their copies on the host.
  Buffer dense_;
  std::vector<float> k_, v_;
  std::exception_ptr failed_;
};

}  // namespace

void ForwardObserved(models::Model& model, const BackendFactory& make_backend, const formats::CacheLayout& layout,
                     std::span<const int32_t> tokens, int64_t max_rows, KvObserver& observer) {
  const std::vector<KvScheme> schemes(layout.layers.size(), KvScheme::Parse("bf16"));
  std::vector<formats::LayerShape> shapes;
  std::vector<int> groups;
  for (const auto& layer : layout.layers) {
    shapes.push_back({layer.kv_heads, layer.shape.head_dim, layer.rope_dim, layer.state});
    groups.push_back(layer.group);
  }
  const formats::CacheLayout unquantized = formats::PlanCache(schemes, shapes, layout.page_size, groups);
  const auto count = static_cast<int64_t>(tokens.size());
  cache::KvCacheManager cache(model.ops().device(), unquantized, {},
                              {.budget_bytes = cache::KvCacheSpec(unquantized).MaxBytes(count), .poison_unused = false},
                              false);
  cache::SequenceCache pages(cache, "");
  ObservedBackend backend(make_backend(cache.pool, {.layers = model.AttentionLayers(), .scales = {}}), model.ops(),
                          unquantized.layers, model.AttentionLayers(), observer);
  runner::Runner runner(model, max_rows, 1);
  while (pages.Length() < count) {
    const int64_t rows = pages.StepTokens(std::min(max_rows, count - pages.Length()));
    pages.Reserve(rows);
    const runner::RunItem item{.tokens = tokens.subspan(static_cast<size_t>(pages.Length()), static_cast<size_t>(rows)),
                               .start = pages.Length(),
                               .pages = pages.Pages(),
                               .first_output = rows};
    runner.Forward({&item, 1}, backend);
    backend.Check();
    pages.Commit(tokens);
  }
}

void CheckEqualHeads(const models::ModelConfig& config) {
  for (const models::LayerSpec& layer : config.layer_specs) {
    if (layer.IsRecurrent() || (layer.kv_heads == config.kv_heads && layer.head_dim == config.head_dim)) continue;
    throw InputError(
        fmt::format("{}: some layers have {} KV heads of {} channels and others {} of {}, which have no +query; use a "
                    "format without it",
                    config.architecture, config.kv_heads, config.head_dim, layer.kv_heads, layer.head_dim));
  }
}

}  // namespace kvanta::observe
