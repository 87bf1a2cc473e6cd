#include "kernels/linear/cuda/gpu_linear_group.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/math.h"
#include "kvanta/error.h"

namespace kvanta::kernels {

using cuda::ProductTile;

GpuLinearGroup::GpuLinearGroup(std::shared_ptr<GpuLinearContext> context, std::vector<std::unique_ptr<Linear>> layers)
    : context_(std::move(context)), layers_(std::move(layers)) {
  std::vector<const uint8_t*> data;
  std::vector<const float*> biases;
  for (size_t member = 0; member < layers_.size(); ++member) {
    const auto* layer = dynamic_cast<const GpuLinear*>(layers_[member].get());  // or of several storages
    if (layer == nullptr || layer->weight().kind != Weight(0).kind || layer->weight().panels != Weight(0).panels) {
      throw InputError(
          fmt::format("{} takes experts whose matrices are stored alike; --weight-dtype bf16 makes them so",
                      context_->gpu->Name()));
    }
    data.push_back(Weight(member).data);
    biases.push_back(Weight(member).bias);
  }
  Device& device = context_->gpu->device();
  const auto upload = [&](const auto& pointers) {
    Buffer buffer = device.Allocate(pointers.size() * sizeof(pointers[0]));
    device.CopyIn(buffer.data(), pointers.data(), buffer.bytes());
    return buffer;
  };
  data_ = upload(data);
  if (biases.front() != nullptr) biases_ = upload(biases);
  const auto unquantized_bytes = static_cast<size_t>(kRowBlock * In()) * sizeof(float);
  if (!Weight(0).panels && context_->f32_rows.bytes() < unquantized_bytes)
    context_->f32_rows = device.Allocate(unquantized_bytes);
}

void GpuLinearGroup::Multiply(const float* x, int64_t count, ProductTile tile, const int32_t* members,
                              float* y) const noexcept {
  const cuda::Weight& weight = Weight(0);
  cuda::LinearOp op{.weight = weight, .tile = tile, .x = context_->Packed()};
  op.group = data_.as<const uint8_t*>();
  op.group_bias = biases_.as<const float*>();
  op.y_stride = weight.out;
  for (int64_t row = 0; row < count; row += kRowBlock) {
    op.rows = std::min(kRowBlock, count - row);
    op.x_f32 = x + row * weight.in;
    op.y = y + row * weight.out;
    op.tile_members = members + row / cuda::RowsOf(tile);
    if (weight.panels) {
      context_->gpu->Run(cuda::PackOp{
          .x = op.x_f32, .x_stride = weight.in, .rows = op.rows, .in = weight.in, .kind = weight.kind, .out = op.x});
    }
    context_->gpu->Run(op);
  }
}

void GpuLinearGroup::Forward(const MemberRows& x, int64_t rows, const MemberOutputs& y) const noexcept {
  const cuda::Weight& weight = Weight(0);
  if (!weight.panels) return ForwardUnquantized(x, rows, y);
  const auto count = static_cast<int64_t>(layers_.size());
  for (int64_t row = 0; row < rows; row += kRowBlock) {
    cuda::LinearOp op{.weight = weight, .tile = ProductTile::k1x1, .x = context_->Packed()};
    op.grouped.used_rows = std::min(kRowBlock, rows - row);
    if (op.grouped.used_rows > cuda::kRowTile) op.tile = ProductTile::k2x4;
    op.grouped.padded_rows = RoundUp(op.grouped.used_rows, cuda::RowsOf(op.tile));
    op.y_stride = y.stride;
    op.y_member_stride = y.member;
    const int64_t at_once = kRowBlock / op.grouped.padded_rows;  // layers
    for (int64_t member = 0; member < count; member += at_once) {
      op.rows = std::min(at_once, count - member) * op.grouped.padded_rows;
      op.group = data_.as<const uint8_t*>() + member;
      if (biases_) op.group_bias = biases_.as<const float*>() + member;
      op.y = y.first + row * y.stride + member * y.member;
      context_->gpu->Run(cuda::PackOp{.x = x.first + row * x.stride + member * x.member,
                                      .x_stride = x.stride,
                                      .x_member_stride = x.member,
                                      .grouped = op.grouped,
                                      .rows = op.rows,
                                      .in = weight.in,
                                      .kind = weight.kind,
                                      .out = op.x});
      context_->gpu->Run(op);
    }
  }
}

// f32 weights, for comparisons: layer by layer.
void GpuLinearGroup::ForwardUnquantized(const MemberRows& x, int64_t rows, const MemberOutputs& y) const noexcept {
  auto* const dense = context_->f32_rows.as<float>();
  for (size_t i = 0; i < layers_.size(); ++i) {
    const auto member = static_cast<int64_t>(i);
    for (int64_t row = 0; row < rows; row += kRowBlock) {
      const int64_t count = std::min(kRowBlock, rows - row);
      context_->gpu->Run(cuda::CopyOp{.x = x.first + row * x.stride + member * x.member,
                                      .x_stride = x.stride,
                                      .ids = nullptr,
                                      .rows = count,
                                      .width = In(),
                                      .out = dense,
                                      .out_stride = In()});
      layers_[i]->Forward(dense, count, y.first + row * y.stride + member * y.member, y.stride);
    }
  }
}

}  // namespace kvanta::kernels
