// Decorator base: an attention backend that forwards every call to another one.
#pragma once

#include <memory>
#include <span>
#include <utility>

#include "attention/backend.h"

namespace kvanta::observe {

class ForwardingBackend : public attention::Backend {
 public:
  explicit ForwardingBackend(std::unique_ptr<attention::Backend> inner) : inner_(std::move(inner)) {}

  attention::BackendInfo Info() const override { return inner_->Info(); }
  std::unique_ptr<attention::Plan> MakePlan(const attention::BatchShape& batch,
                                            std::unique_ptr<attention::Plan> plan) override {
    return inner_->MakePlan(batch, std::move(plan));
  }
  void Append(attention::Plan& plan, int layer, const float* k, const float* v, int64_t kv_stride) noexcept override {
    inner_->Append(plan, layer, k, v, kv_stride);
  }
  void EncodeLevels(int group, const uint8_t* quantized, std::span<uint8_t* const> later) noexcept override {
    inner_->EncodeLevels(group, quantized, later);
  }
  void Run(attention::Plan& plan, int layer, const float* q, int64_t q_stride, float* out,
           const kernels::Linear* reader) noexcept override {
    inner_->Run(plan, layer, q, q_stride, out, reader);
  }
  void Select(attention::Plan& plan, int layer, const float* q, int64_t q_stride,
              const float* weights) noexcept override {
    inner_->Select(plan, layer, q, q_stride, weights);
  }
  std::span<const int32_t> Selected(const attention::Plan& plan, int64_t row) const noexcept override {
    return inner_->Selected(plan, row);
  }
  cache::StateStep States(const attention::Plan& plan, int layer) const noexcept override {
    return inner_->States(plan, layer);
  }
  void AcceptDrafts(attention::Plan& plan, std::span<const int> accepted) const noexcept override {
    inner_->AcceptDrafts(plan, accepted);
  }
  attention::AppendCounts Counts(int layer) const override { return inner_->Counts(layer); }
  void FetchCounts() override { inner_->FetchCounts(); }
  const formats::LayerScales& Scales(int layer) const override { return inner_->Scales(layer); }

 private:
  std::unique_ptr<attention::Backend> inner_;
};

}  // namespace kvanta::observe
