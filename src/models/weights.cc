#include "models/weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/quote.h"
#include "kvanta/error.h"
#include "models/kv_scales.h"

namespace kvanta::models {
namespace {

using kernels::WeightType;

// Smallest f32 magnitude, as bits, that is not finite after rounding to `store`.
uint32_t FirstNotFinite(WeightType store) {
  switch (store) {
    case WeightType::kF16:
      return std::bit_cast<uint32_t>(65520.0F);  // rounds to infinity
    case WeightType::kBf16:
      return 0x7f7f8000U;  // rounds to infinity
    case WeightType::kF32:
    case WeightType::kInt8:
    case WeightType::kInt4:
    case WeightType::kStored:
      break;
  }
  return 0x7f800000U;
}

std::string_view StoreName(WeightType store) {
  if (store == WeightType::kF16) return Name(DType::kF16);
  return store == WeightType::kBf16 ? Name(DType::kBf16) : Name(DType::kF32);
}

// Magnitude of element `i` as f32 bits. f16 magnitudes are shifted to the same order with infinity at infinity.
template <DType kType>
uint32_t Magnitude(const void* data, int64_t i) {
  if constexpr (kType == DType::kF32) {
    return static_cast<const uint32_t*>(data)[i] & 0x7fffffffU;
  } else {
    const uint32_t bits = static_cast<const uint16_t*>(data)[i] & 0x7fffU;
    if constexpr (kType == DType::kBf16) return bits << 16;
    return bits >= 0x7c00U ? 0x7f800000U + bits : 0;  // every finite f16 fits every store
  }
}

template <DType kType>
uint32_t LargestMagnitude(const void* data, int64_t begin, int64_t end) {
  uint32_t largest = 0;
  for (int64_t i = begin; i < end; ++i) largest = std::max(largest, Magnitude<kType>(data, i));
  return largest;
}

uint32_t LargestMagnitude(const kernels::WeightView& weight, int64_t begin, int64_t end) {
  switch (weight.dtype) {
    case DType::kF32:
      return LargestMagnitude<DType::kF32>(weight.data, begin, end);
    case DType::kBf16:
      return LargestMagnitude<DType::kBf16>(weight.data, begin, end);
    case DType::kF16:
      break;
  }
  return LargestMagnitude<DType::kF16>(weight.data, begin, end);
}

DType TypeOf(const TensorView& tensor, const std::string& name) {
  if (tensor.dtype == "BF16") return DType::kBf16;
  if (tensor.dtype == "F16") return DType::kF16;
  if (tensor.dtype == "F32") return DType::kF32;
  throw InputError(
      fmt::format("tensor {} is stored as {}; weights are read from BF16, F16 or F32", Quote(name), tensor.dtype));
}

// Throws at the first value that is NaN or infinite, or becomes so when stored as `store`.
void CheckFinite(const kernels::WeightView& weight, const std::string& name, WeightType store, ThreadPool& threads) {
  constexpr int64_t kChunk = int64_t{1} << 20;
  const int64_t count = weight.out * weight.in;
  const uint32_t limit = FirstNotFinite(store);
  std::atomic<int64_t> bad_chunk{count};
  auto check = [&](int64_t chunk, int) {
    if (LargestMagnitude(weight, chunk * kChunk, std::min(count, (chunk + 1) * kChunk)) < limit) return;
    int64_t seen = bad_chunk.load();
    while (chunk < seen && !bad_chunk.compare_exchange_weak(seen, chunk)) {
    }
  };
  threads.ForEach((count + kChunk - 1) / kChunk, check);
  if (bad_chunk == count) return;
  int64_t i = bad_chunk * kChunk;
  while (LargestMagnitude(weight, i, i + 1) < limit) ++i;
  const float value = ElementValue(weight, i);
  const char* what = std::isnan(value) ? "is NaN" : std::isinf(value) ? "is infinite" : "is out of range";
  throw InputError(fmt::format("tensor {}: value {} (row {}, column {}) {} in {}", Quote(name), value, i / weight.in,
                               i % weight.in, what, StoreName(store)));
}

}  // namespace

WeightReader::WeightReader(const Checkpoint& checkpoint, kernels::Ops& ops) : checkpoint_(checkpoint), ops_(ops) {}

bool WeightReader::HasPrefix(std::string_view prefix) const {
  const auto found = checkpoint_.Tensors().lower_bound(prefix);
  return found != checkpoint_.Tensors().end() && found->first.starts_with(prefix);
}

kernels::WeightView WeightReader::Elements(const std::string& name, std::span<const int64_t> shape, WeightType store) {
  kernels::WeightView view = Read(name, shape);
  view.in = shape.back();
  view.out = 1;
  for (const int64_t size : shape.first(shape.size() - 1)) view.out *= size;
  CheckFinite(view, name, store, ops_.threads());
  return view;
}

const TensorView& WeightReader::Tensor(const std::string& name, std::span<const int64_t> shape) {
  const TensorView& tensor = checkpoint_.Get(name);
  if (!std::equal(shape.begin(), shape.end(), tensor.shape.begin(), tensor.shape.end())) {
    throw InputError(fmt::format("{}: tensor {} has shape {}; config.json asks for {}", checkpoint_.Folder(),
                                 Quote(name), ShapeText(tensor.shape), ShapeText(shape)));
  }
  read_.insert(name);
  return tensor;
}

kernels::WeightView WeightReader::Read(const std::string& name, std::span<const int64_t> shape) {
  const TensorView& tensor = Tensor(name, shape);
  const DType dtype = TypeOf(tensor, name);
  const void* data = tensor.data.data();
  if (reinterpret_cast<uintptr_t>(data) % SizeOf(dtype) != 0) {
    aligned_.emplace_back((tensor.data.size() + 3) / 4);
    std::memcpy(aligned_.back().data(), data, tensor.data.size());
    data = aligned_.back().data();
  }
  return {data, dtype, shape[0], shape.size() > 1 ? shape[1] : 1};
}

void WeightReader::AppendVector(const std::string& name, int64_t size, std::vector<float>& out) {
  const kernels::WeightView view = Read(name, std::array{size});
  CheckFinite(view, name, WeightType::kF32, ops_.threads());
  for (int64_t i = 0; i < size; ++i) out.push_back(ElementValue(view, i));
  aligned_.clear();
}

std::vector<float> WeightReader::Matrix(const std::string& name, int64_t out, int64_t in, WeightType store) {
  const kernels::WeightView view = Read(name, std::array{out, in});
  CheckFinite(view, name, store, ops_.threads());
  std::vector<float> values(static_cast<size_t>(out * in));
  auto read = [&](int64_t row, int) {
    for (int64_t i = row * in; i < (row + 1) * in; ++i) values[static_cast<size_t>(i)] = ElementValue(view, i);
  };
  ops_.threads().ForEach(out, read);
  aligned_.clear();
  return values;
}

std::unique_ptr<kernels::Linear> WeightReader::Pack(std::span<const float> values, int64_t out, int64_t in,
                                                    std::span<const float> bias, kernels::LinearKind kind,
                                                    std::string_view module) {
  return Pack({.data = values.data(), .dtype = DType::kF32, .out = out, .in = in, .module = module}, bias, kind);
}

std::unique_ptr<kernels::Linear> WeightReader::Pack(const kernels::WeightView& view, std::span<const float> bias,
                                                    kernels::LinearKind kind) {
  std::unique_ptr<kernels::Linear> linear = ops_.MakeLinear({&view, 1}, bias, kind);
  bytes_ += linear->WeightBytes() + static_cast<int64_t>(bias.size_bytes());
  return linear;
}

std::vector<float> WeightReader::Values(const std::string& name, int64_t size) {
  std::vector<float> values;
  AppendVector(name, size, values);
  return values;
}

std::vector<float> WeightReader::KeptValues(const std::string& name, int64_t size) {
  bytes_ += size * static_cast<int64_t>(sizeof(float));
  return Values(name, size);
}

Buffer WeightReader::Vector(const std::string& name, int64_t size, float offset) {
  std::vector<float> values = Values(name, size);
  for (float& value : values) value += offset;
  const size_t bytes = values.size() * sizeof(float);
  Buffer buffer = ops_.device().Allocate(bytes);
  ops_.device().CopyIn(buffer.data(), values.data(), bytes);
  bytes_ += static_cast<int64_t>(bytes);
  return buffer;
}

std::unique_ptr<kernels::Linear> WeightReader::Linear(std::initializer_list<StackedWeight> stack, int64_t in, bool bias,
                                                      kernels::LinearKind kind) {
  std::vector<float> biases;
  if (bias) {
    for (const auto& [module, out] : stack) AppendVector(module + ".bias", out, biases);
  }
  std::vector<kernels::WeightView> views;
  for (const auto& [module, out] : stack) {
    const std::string name = module + ".weight";
    kernels::WeightView view = Read(name, std::array{out, in});
    if (kind.weights == WeightType::kInt8 || kind.weights == WeightType::kInt4) {
      if (!blocks_) blocks_.emplace(checkpoint_.Folder());
      view = blocks_->Find(name, view, kind.weights).value_or(view);
    }
    if (view.blocks == kernels::BlockFormat::kNone) CheckFinite(view, name, kind.weights, ops_.threads());
    view.module = module;
    views.push_back(view);
  }
  std::unique_ptr<kernels::Linear> linear = ops_.MakeLinear(views, biases, kind);
  aligned_.clear();
  bytes_ += linear->WeightBytes() + static_cast<int64_t>(biases.size() * sizeof(float));
  return linear;
}

void WeightReader::CheckUnusedTensors(const TensorNames::Decoder& names, int layers, int spare) const {
  const auto is_spare = [&](std::string_view name) {
    for (int layer = layers; layer < layers + spare; ++layer) {
      if (name.starts_with(fmt::format("{}layers.{}.", names.prefix, layer))) return true;
    }
    return false;
  };
  for (const auto& [name, tensor] : checkpoint_.Tensors()) {
    const std::string head = std::string(names.lm_head) + ".";
    const bool is_decoder = name.starts_with(names.prefix) || name.starts_with(head);
    // Old checkpoints carry the rope frequencies; a tied lm_head repeats the embeddings.
    const bool known = name.ends_with(".rotary_emb.inv_freq") || name == head + "weight" || IsKvScaleTensor(name);
    if (!is_decoder || known || read_.contains(name) || is_spare(name)) continue;
    throw InputError(fmt::format("{}: tensor {} would be ignored: config.json describes a model without it",
                                 checkpoint_.Folder(), Quote(name)));
  }
}

}  // namespace kvanta::models
