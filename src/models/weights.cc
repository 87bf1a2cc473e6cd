#include "models/weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/math.h"
#include "base/quote.h"
#include "kvanta/error.h"
#include "models/kv_scale_names.h"

namespace kvanta::models {
namespace {

using kernels::WeightType;
using weights::BlockFormat;
using weights::WeightView;

void SetRowOrder(const StackedWeight& weight, WeightView& view) {
  if (weight.interleaved_heads == 0) return;
  view.interleaved_heads = weight.interleaved_heads;
  view.interleaved_first = weight.interleaved_first;
}

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

uint32_t LargestMagnitude(const WeightView& weight, int64_t begin, int64_t end) {
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

DType TypeOf(const weights::TensorView& tensor, const std::string& name) {
  if (tensor.dtype == "BF16") return DType::kBf16;
  if (tensor.dtype == "F16") return DType::kF16;
  if (tensor.dtype == "F32") return DType::kF32;
  throw InputError(
      fmt::format("tensor {} is stored as {}; weights are read from BF16, F16 or F32", Quote(name), tensor.dtype));
}

[[noreturn]] void FailNotFinite(const std::string& name, float value, int64_t row, int64_t column, WeightType store) {
  const char* what = std::isnan(value) ? "is NaN" : std::isinf(value) ? "is infinite" : "is out of range";
  throw InputError(fmt::format("tensor {}: value {} (row {}, column {}) {} in {}", Quote(name), value, row, column,
                               what, StoreName(store)));
}

// Number of the first of `count` parts that has a value of at least `limit`; `count` if none has. `largest_of(part,
// worker)` is its largest magnitude.
template <class LargestOf>
int64_t FirstBadPart(int64_t count, uint32_t limit, ThreadPool& threads, const LargestOf& largest_of) {
  std::atomic<int64_t> bad{count};
  auto check = [&](int64_t part, int worker) {
    if (largest_of(part, worker) < limit) return;
    int64_t seen = bad.load();
    while (part < seen && !bad.compare_exchange_weak(seen, part)) {
    }
  };
  threads.ForEach(count, check);
  return bad;
}

void CheckFiniteBlocks(const WeightView& weight, const std::string& name, WeightType store, ThreadPool& threads) {
  const uint32_t limit = FirstNotFinite(store);
  std::vector<float> rows(static_cast<size_t>(threads.Threads() * weight.in));
  const auto read_row = [&](int64_t row, int worker) {
    float* values = rows.data() + worker * weight.in;
    ReadWeightRow(weight, row, values);
    return values;
  };
  const int64_t row = FirstBadPart(weight.out, limit, threads, [&](int64_t part, int worker) {
    return LargestMagnitude<DType::kF32>(read_row(part, worker), 0, weight.in);
  });
  if (row == weight.out) return;
  const float* values = read_row(row, 0);
  int64_t column = 0;
  while (LargestMagnitude<DType::kF32>(values, column, column + 1) < limit) ++column;
  FailNotFinite(name, values[column], row, column, store);
}

// Throws at the first value that is NaN or infinite, or becomes so when stored as `store`.
void CheckFinite(const WeightView& weight, const std::string& name, WeightType store, ThreadPool& threads) {
  if (weight.blocks != BlockFormat::kNone) return CheckFiniteBlocks(weight, name, store, threads);
  constexpr int64_t kChunk = int64_t{1} << 20;
  const int64_t count = weight.out * weight.in, chunks = CeilDiv(count, kChunk);
  const uint32_t limit = FirstNotFinite(store);
  const int64_t bad_chunk = FirstBadPart(chunks, limit, threads, [&](int64_t chunk, int) {
    return LargestMagnitude(weight, chunk * kChunk, std::min(count, (chunk + 1) * kChunk));
  });
  if (bad_chunk == chunks) return;
  int64_t i = bad_chunk * kChunk;
  while (LargestMagnitude(weight, i, i + 1) < limit) ++i;
  FailNotFinite(name, ElementValue(weight, i), i / weight.in, i % weight.in, store);
}

}  // namespace

float ElementValue(const WeightView& weight, int64_t i) noexcept {
  if (weight.dtype == DType::kF32) return static_cast<const float*>(weight.data)[i];
  const uint16_t code = static_cast<const uint16_t*>(weight.data)[i];
  return weight.dtype == DType::kBf16 ? Bf16ToFloat(code) : Fp16ToFloat(code);
}

WeightReader::WeightReader(const weights::Checkpoint& checkpoint, kernels::Ops& ops, bool keep_types,
                           const weights::QuantizationConfig& quantization, bool keep_quantized,
                           const parallel::Communicator* ranks)
    : checkpoint_(checkpoint),
      ops_(ops),
      keep_types_(keep_types),
      quantization_(quantization),
      keep_quantized_(keep_quantized),
      ranks_(ranks) {}

WeightReader::Rows WeightReader::RowsOf(const StackedWeight& weight) const noexcept {
  if (ranks_ == nullptr || weight.whole) return {.first = 0, .count = weight.out};
  const parallel::Partition rows = ranks_->PartitionOf(weight.out);
  return {.first = rows.Begin(ranks_->Rank()), .count = rows.Size(ranks_->Rank())};
}

bool WeightReader::HasPrefix(std::string_view prefix) const {
  const auto found = checkpoint_.Tensors().lower_bound(prefix);
  return found != checkpoint_.Tensors().end() && found->first.starts_with(prefix);
}

void WeightReader::SkipTensors(std::string_view prefix) {
  const auto& tensors = checkpoint_.Tensors();
  for (auto next = tensors.lower_bound(prefix); next != tensors.end() && next->first.starts_with(prefix); ++next) {
    read_.insert(next->first);
  }
}

WeightView WeightReader::Elements(const std::string& name, std::span<const int64_t> shape, WeightType store) {
  WeightView view = Read(name, shape);
  view.in = shape.back();
  view.out = 1;
  for (const int64_t size : shape.first(shape.size() - 1)) view.out *= size;
  CheckFinite(view, name, store, ops_.threads());
  return view;
}

const weights::TensorView& WeightReader::Tensor(const std::string& name, std::span<const int64_t> shape) {
  const weights::TensorView& tensor = checkpoint_.Get(name);
  if (!std::equal(shape.begin(), shape.end(), tensor.shape.begin(), tensor.shape.end())) {
    throw InputError(fmt::format("{}: tensor {} has shape {}; config.json asks for {}", checkpoint_.Name(), Quote(name),
                                 weights::ShapeText(tensor.shape), weights::ShapeText(shape)));
  }
  read_.insert(name);
  mapped_.push_back(&tensor);
  return tensor;
}

WeightView WeightReader::Read(const std::string& name, std::span<const int64_t> shape) {
  const weights::TensorView& tensor = Tensor(name, shape);
  const bool is_vector = shape.size() < 2;
  WeightView view{.data = tensor.data.data(),
                  .out = shape[0],
                  .in = is_vector ? 1 : shape[1],
                  .blocks = is_vector ? BlockFormat::kNone : weights::FindBlockFormat(tensor.dtype),
                  .interleaved_heads = tensor.interleaved_heads};
  if (view.blocks == BlockFormat::kNone) {
    view.dtype = TypeOf(tensor, name);
    if (reinterpret_cast<uintptr_t>(view.data) % SizeOf(view.dtype) != 0) {
      aligned_.emplace_back((tensor.data.size() + 3) / 4);
      std::memcpy(aligned_.back().data(), view.data, tensor.data.size());
      view.data = aligned_.back().data();
    }
  }
  return view;
}

void WeightReader::ReleaseTensors() noexcept {
  aligned_.clear();
  for (const weights::TensorView* tensor : mapped_) checkpoint_.Evict(*tensor);
  mapped_.clear();
}

void WeightReader::AppendVector(const std::string& name, const StackedWeight& weight, Rows rows,
                                std::vector<float>& out) {
  WeightView view = Read(name, std::array{weight.TensorOut()});
  SetRowOrder(weight, view);
  CheckFinite(view, name, WeightType::kF32, ops_.threads());
  const int64_t first = weight.tensor_first + rows.first;
  for (int64_t i = first; i < first + rows.count; ++i) out.push_back(ElementValue(view, view.StoredRow(i)));
  ReleaseTensors();
}

std::vector<float> WeightReader::Matrix(const std::string& name, int64_t out, int64_t in, WeightType store) {
  const std::string module = name.substr(0, name.size() - std::string_view(".weight").size());
  const StackedWeight weight{.module = module, .out = out};
  if (const auto quantized = FindQuantized(weight, in, true)) {
    std::vector<float> values = Expand(*quantized, module, store);
    ReleaseTensors();
    return values;
  }
  const WeightView view = ReadWeight(weight, in);
  CheckFinite(view, name, store, ops_.threads());
  std::vector<float> values(static_cast<size_t>(view.out * in));
  auto read = [&](int64_t row, int) { ReadWeightRow(view, row, values.data() + row * in); };
  ops_.threads().ForEach(view.out, read);
  ReleaseTensors();
  return values;
}

std::unique_ptr<kernels::Linear> WeightReader::Pack(std::span<const WeightView> stacked, std::span<const float> bias,
                                                    kernels::LinearKind kind) {
  try {
    std::unique_ptr<kernels::Linear> linear = ops_.MakeLinear(stacked, bias, kind);
    bytes_ += linear->WeightBytes() + static_cast<int64_t>(bias.size_bytes());
    return linear;
  } catch (const InputError& error) {
    throw InputError(fmt::format("{}: {}: {}", checkpoint_.Name(), stacked.front().module, error.what()));
  }
}

std::unique_ptr<kernels::Linear> WeightReader::Pack(std::span<const float> values, int64_t out, int64_t in,
                                                    std::span<const float> bias, kernels::LinearKind kind,
                                                    std::string_view module) {
  const WeightView view{.data = values.data(), .dtype = DType::kF32, .out = out, .in = in, .module = module};
  return Pack(std::span(&view, 1), bias, kind);
}

std::vector<float> WeightReader::Values(const std::string& name, int64_t size) {
  std::vector<float> values;
  AppendVector(name, {.module = name, .out = size}, {.first = 0, .count = size}, values);
  return values;
}

float WeightReader::Scalar(const std::string& name) {
  if (!HasShape(name, {})) return Values(name, 1).front();
  const weights::TensorView& tensor = Tensor(name, {});
  std::array<uint32_t, 1> bytes{};  // aligned
  std::memcpy(bytes.data(), tensor.data.data(), std::min(sizeof bytes, tensor.data.size()));
  const WeightView view{.data = bytes.data(), .dtype = TypeOf(tensor, name), .out = 1, .in = 1};
  CheckFinite(view, name, WeightType::kF32, ops_.threads());
  return ElementValue(view, 0);
}

std::vector<float> WeightReader::KeptValues(const std::string& name, int64_t size) {
  bytes_ += size * static_cast<int64_t>(sizeof(float));
  return Values(name, size);
}

Buffer WeightReader::Vector(const std::string& name, int64_t size, float offset, double scale, int64_t rows) {
  std::vector<float> values = rows == 0 ? Values(name, size) : Matrix(name, rows, size, WeightType::kF32);
  for (float& value : values) value = static_cast<float>(double{value + offset} * scale);
  const size_t bytes = values.size() * sizeof(float);
  Buffer buffer = ops_.device().Allocate(bytes);
  ops_.device().CopyIn(buffer.data(), values.data(), bytes);
  bytes_ += static_cast<int64_t>(bytes);
  return buffer;
}

std::unique_ptr<kernels::Linear> WeightReader::Linear(std::span<const StackedWeight> stack, int64_t in, bool bias,
                                                      kernels::LinearKind kind) {
  std::vector<float> biases;
  if (bias) {
    for (const StackedWeight& weight : stack) AppendVector(weight.module + ".bias", weight, RowsOf(weight), biases);
  }
  // Routers of experts ask for f32.
  if (keep_types_ && kind.weights != WeightType::kF32) kind.weights = WeightType::kStored;
  std::vector<std::unique_ptr<weights::QuantizedWeight>> quantized;
  for (const StackedWeight& weight : stack) quantized.push_back(FindQuantized(weight, in, bias));
  std::unique_ptr<kernels::Linear> linear;
  if (std::ranges::any_of(quantized, [](const auto& weight) { return weight != nullptr; })) {
    linear = QuantizedLinear(stack, quantized, in, biases, kind);
  } else {
    std::vector<WeightView> views;
    for (const StackedWeight& weight : stack) views.push_back(ReadWeight(weight, in));
    for (const WeightView& view : views) CheckWeight(view, kind.weights);
    linear = Pack(views, biases, kind);
  }
  ReleaseTensors();
  return linear;
}

bool WeightReader::AmplifiesRounding(std::string_view module) const {
  const weights::TensorView* tensor = keep_types_ ? checkpoint_.Find(fmt::format("{}.weight", module)) : nullptr;
  return tensor != nullptr && weights::AmplifiesRounding(weights::FindBlockFormat(tensor->dtype));
}

WeightView WeightReader::ReadWeight(const StackedWeight& weight, int64_t in) {
  WeightView view =
      transposed_ ? ReadTransposed(weight, in) : Read(weight.module + ".weight", std::array{weight.TensorOut(), in});
  SetRowOrder(weight, view);
  const Rows rows = RowsOf(weight);
  view = view.Rows(weight.tensor_first + rows.first, rows.count);
  view.module = weight.module;
  return view;
}

WeightView WeightReader::ReadTransposed(const StackedWeight& weight, int64_t in) {
  const int64_t out = weight.TensorOut();
  const WeightView stored = Read(weight.module + ".weight", std::array{in, out});
  std::vector<uint32_t>& values = aligned_.emplace_back(static_cast<size_t>(out * in));
  constexpr int64_t kColumns = 64;  // at a time
  auto transpose = [&](int64_t part, int) {
    const int64_t first = part * kColumns, end = std::min(out, first + kColumns);
    for (int64_t i = 0; i < in; ++i) {
      for (int64_t o = first; o < end; ++o) {
        values[static_cast<size_t>(o * in + i)] = std::bit_cast<uint32_t>(ElementValue(stored, i * out + o));
      }
    }
  };
  ops_.threads().ForEach(CeilDiv(out, kColumns), transpose);
  return {.data = values.data(), .dtype = DType::kF32, .out = out, .in = in};
}

void WeightReader::CheckWeight(const WeightView& view, WeightType store) const {
  // Scales of blocks that are kept are checked while they are packed.
  if (KeepsBlocks(store, view.blocks)) return;
  CheckFinite(view, fmt::format("{}.weight", view.module), store, ops_.threads());
}

bool WeightReader::HasShape(std::string_view name, std::span<const int64_t> shape) const {
  const weights::TensorView* tensor = checkpoint_.Find(name);
  return tensor != nullptr && std::ranges::equal(tensor->shape, shape);
}

void WeightReader::CheckUnusedTensors(const TensorNames::Decoder& names, int layers, int spare) const {
  const std::string predictors = fmt::format("{}mtp", names.prefix);  // next to the layers: mtp_... or mtp.
  const auto is_spare = [&](std::string_view name) {
    if (name.starts_with(predictors + "_") || name.starts_with(predictors + ".")) return true;
    for (int layer = layers; layer < layers + spare; ++layer) {
      if (name.starts_with(fmt::format("{}{}.{}.", names.prefix, names.layers, layer))) return true;
    }
    return false;
  };
  for (const auto& [name, tensor] : checkpoint_.Tensors()) {
    const std::string head = std::string(names.lm_head) + ".";
    const bool is_decoder = name.starts_with(names.prefix) || name.starts_with(head);
    // Old checkpoints carry the rope frequencies, or tables of them; a tied lm_head repeats the embeddings.
    const bool is_rope_table = name.ends_with(".rotary_emb.inv_freq") || name.ends_with("rotary_pos_emb.inv_freq") ||
                               name.ends_with(".rotary_emb.cos_cached") || name.ends_with(".rotary_emb.sin_cached");
    // Causal masks of GPT-2 and GPT-NeoX.
    const bool is_mask = name.ends_with(".attn.bias") || name.ends_with(".attention.bias") ||
                         name.ends_with(".attn.masked_bias") || name.ends_with(".attention.masked_bias");
    const bool known = is_rope_table || is_mask || name == head + "weight" || IsKvScaleTensor(name);
    if (!is_decoder || known || read_.contains(name) || is_spare(name)) continue;
    throw InputError(fmt::format("{}: tensor {} would be ignored: config.json describes a model without it",
                                 checkpoint_.Name(), Quote(name)));
  }
}

}  // namespace kvanta::models
