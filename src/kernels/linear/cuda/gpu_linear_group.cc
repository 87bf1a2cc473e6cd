#include "kernels/linear/cuda/gpu_linear_group.h"

#include <algorithm>
#include <utility>

namespace kvanta::kernels {
namespace {

using cuda::ProductTile;

constexpr int64_t RoundUp(int64_t value, int64_t step) {
  return (value + step - 1) / step * step;
}

}  // namespace

GpuLinearGroup::GpuLinearGroup(std::shared_ptr<GpuLinearContext> context, std::vector<std::unique_ptr<Linear>> layers)
    : context_(std::move(context)), layers_(std::move(layers)) {
  std::vector<const uint8_t*> data;
  for (size_t member = 0; member < layers_.size(); ++member) data.push_back(Weight(member).data);
  Device& device = context_->gpu->device();
  data_ = device.Allocate(data.size() * sizeof(data[0]));
  device.CopyIn(data_.data(), data.data(), data_.bytes());
  const auto unquantized_bytes = static_cast<size_t>(kRowBlock * In()) * sizeof(float);
  if (!Weight(0).panels && context_->plain.bytes() < unquantized_bytes)
    context_->plain = device.Allocate(unquantized_bytes);
}

void GpuLinearGroup::Multiply(const float* x, int64_t slots, ProductTile tile, const int32_t* members,
                              float* y) const noexcept {
  const cuda::Weight& weight = Weight(0);
  cuda::LinearWork work{.weight = weight, .tile = tile, .x = context_->Packed()};
  work.group = data_.as<const uint8_t*>();
  work.y_stride = weight.out;
  for (int64_t slot = 0; slot < slots; slot += kRowBlock) {
    work.rows = std::min(kRowBlock, slots - slot);
    work.plain = x + slot * weight.in;
    work.y = y + slot * weight.out;
    work.tile_members = members + slot / cuda::RowsOf(tile);
    if (weight.panels) {
      context_->gpu->Run(cuda::PackWork{.x = work.plain,
                                        .x_stride = weight.in,
                                        .rows = work.rows,
                                        .in = weight.in,
                                        .kind = weight.kind,
                                        .out = work.x});
    }
    context_->gpu->Run(work);
  }
}

void GpuLinearGroup::Forward(const MemberRows& x, int64_t rows, const MemberOutputs& y) const noexcept {
  const cuda::Weight& weight = Weight(0);
  if (!weight.panels) return ForwardUnquantized(x, rows, y);
  const auto count = static_cast<int64_t>(layers_.size());
  for (int64_t row = 0; row < rows; row += kRowBlock) {
    cuda::LinearWork work{.weight = weight, .tile = ProductTile::k1x1, .x = context_->Packed()};
    work.members.used = std::min(kRowBlock, rows - row);
    if (work.members.used > cuda::kRowTile) work.tile = ProductTile::k2x4;
    work.members.rows = RoundUp(work.members.used, cuda::RowsOf(work.tile));
    work.y_stride = y.stride;
    work.y_member = y.member;
    const int64_t at_once = kRowBlock / work.members.rows;  // members
    for (int64_t member = 0; member < count; member += at_once) {
      work.rows = std::min(at_once, count - member) * work.members.rows;
      work.group = data_.as<const uint8_t*>() + member;
      work.y = y.first + row * y.stride + member * y.member;
      context_->gpu->Run(cuda::PackWork{.x = x.first + row * x.stride + member * x.member,
                                        .x_stride = x.stride,
                                        .x_member = x.member,
                                        .members = work.members,
                                        .rows = work.rows,
                                        .in = weight.in,
                                        .kind = weight.kind,
                                        .out = work.x});
      context_->gpu->Run(work);
    }
  }
}

// f32 is for comparisons: layer by layer.
void GpuLinearGroup::ForwardUnquantized(const MemberRows& x, int64_t rows, const MemberOutputs& y) const noexcept {
  auto* const dense = context_->plain.as<float>();
  for (size_t i = 0; i < layers_.size(); ++i) {
    const auto member = static_cast<int64_t>(i);
    for (int64_t row = 0; row < rows; row += kRowBlock) {
      const int64_t count = std::min(kRowBlock, rows - row);
      context_->gpu->Run(cuda::CopyWork{.x = x.first + row * x.stride + member * x.member,
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
