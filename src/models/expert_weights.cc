#include "models/expert_weights.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/math.h"
#include "models/mxfp4_weights.h"

namespace kvanta::models {
namespace {

using kernels::BlockFormat;
using kernels::ExpertWeights;
using kernels::Linear;
using kernels::WeightView;

// Row of gate | up in the checkpoint's order.
int64_t GateUpRow(const BlockSource& source, int64_t row) {
  const int64_t width = source.config.moe.moe_intermediate_size;
  if (!source.config.names.interleaved_gate_up) return row;
  return row < width ? 2 * row : 2 * (row - width) + 1;
}

// Biases of an expert [out], in the order of its rows; none without biases. `values`: [experts][out].
template <class SourceRow>
std::vector<float> Biases(const std::vector<float>& values, int64_t expert, int64_t out, const SourceRow& source_row) {
  std::vector<float> biases;
  for (int64_t row = 0; !values.empty() && row < out; ++row) {
    biases.push_back(values[static_cast<size_t>(expert * out + source_row(row))]);
  }
  return biases;
}

std::vector<float> ReadBiases(const BlockSource& source, const std::string& name, int64_t out) {
  if (!source.config.moe.bias) return {};
  const int64_t experts = source.config.moe.num_experts;
  const WeightView view = source.reader.Elements(name, std::array{experts, out}, kernels::WeightType::kF32);
  std::vector<float> values;
  for (int64_t i = 0; i < experts * out; ++i) values.push_back(ElementValue(view, i));
  return values;
}

// out[row][k] = in[k][source_row(row)]: 16-bit or 32-bit elements in their type.
template <class Element, class SourceRow>
void Transpose(const Element* in, int64_t rows, int64_t width, const SourceRow& source_row, ThreadPool& threads,
               Element* out) {
  constexpr int64_t kRows = 32;  // at once, so that whole lines are read
  auto transpose = [&](int64_t task, int) {
    const int64_t first = task * kRows, end = std::min(rows, first + kRows);
    for (int64_t k = 0; k < width; ++k) {
      for (int64_t row = first; row < end; ++row) out[row * width + k] = in[k * rows + source_row(row)];
    }
  };
  threads.ForEach(CeilDiv(rows, kRows), transpose);
}

// The matrices of one kind of all experts in one tensor, [experts][in][out] or [experts][out][in].
template <class SourceRow>
std::vector<std::unique_ptr<Linear>> ReadFused(const BlockSource& source, const std::string& name, int64_t out,
                                               int64_t in, const SourceRow& source_row) {
  const int64_t experts = source.config.moe.num_experts;
  const std::vector<float> biases = ReadBiases(source, name + "_bias", out);
  const bool transposed = source.config.names.transposed_experts;
  const WeightView all = source.reader.Elements(
      name, transposed ? std::array{experts, in, out} : std::array{experts, out, in}, source.store);
  const int64_t bytes = out * in * SizeOf(all.dtype);
  std::vector<uint32_t> matrix(transposed ? static_cast<size_t>(CeilDiv(bytes, sizeof(uint32_t))) : 0);
  std::vector<std::unique_ptr<Linear>> layers;
  for (int64_t expert = 0; expert < experts; ++expert) {
    const uint8_t* data = static_cast<const uint8_t*>(all.data) + expert * bytes;
    WeightView view{.data = matrix.data(), .dtype = all.dtype, .out = out, .in = in, .module = name};
    if (!transposed) {
      view.data = data;
    } else if (all.dtype == DType::kF32) {
      Transpose(reinterpret_cast<const uint32_t*>(data), out, in, source_row, source.ops.threads(), matrix.data());
    } else {
      Transpose(reinterpret_cast<const uint16_t*>(data), out, in, source_row, source.ops.threads(),
                reinterpret_cast<uint16_t*>(matrix.data()));
    }
    layers.push_back(source.reader.Pack(view, Biases(biases, expert, out, source_row), source.store));
  }
  return layers;
}

// The same in MXFP4, [experts][out][in / 32][16] of codes and [experts][out][in / 32] of scales. Kept as they are,
// or expanded to bf16, which is exact.
template <class SourceRow>
std::vector<std::unique_ptr<Linear>> ReadMxfp4(const BlockSource& source, const std::string& name, int64_t out,
                                               int64_t in, const SourceRow& source_row) {
  const std::vector<float> biases = ReadBiases(source, name + "_bias", out);
  const Mxfp4Tensor tensor(source.reader, name, source.config.moe.num_experts, out, in);
  const bool keep = source.reader.KeepsQuantized(source.store);
  const int64_t row_bytes = keep ? kernels::RowBytes(BlockFormat::kMXFP4, in) : in * SizeOf(DType::kBf16);
  std::vector<uint16_t> matrix(static_cast<size_t>(CeilDiv(out * row_bytes, sizeof(uint16_t))));
  const WeightView view{.data = matrix.data(),
                        .dtype = DType::kBf16,
                        .out = out,
                        .in = in,
                        .blocks = keep ? BlockFormat::kMXFP4 : BlockFormat::kNone,
                        .module = name};
  std::vector<std::unique_ptr<Linear>> layers;
  for (int64_t expert = 0; expert < source.config.moe.num_experts; ++expert) {
    auto read = [&](int64_t row, int) {
      uint8_t* bytes = reinterpret_cast<uint8_t*>(matrix.data()) + row * row_bytes;
      if (keep) {
        tensor.CopyRow(expert, source_row(row), bytes);
      } else {
        tensor.DecodeRow(expert, source_row(row), reinterpret_cast<uint16_t*>(bytes));
      }
    };
    source.ops.threads().ForEach(out, read);
    layers.push_back(source.reader.Pack(view, Biases(biases, expert, out, source_row),
                                        keep ? kernels::WeightType::kStored : source.store));
  }
  return layers;
}

struct ModuleNames {
  const char *gate, *up, *down;
};

std::vector<ExpertWeights> ReadModules(const BlockSource& source, const std::string& module, const ModuleNames& names) {
  const int64_t hidden = source.config.hidden, width = source.config.moe.moe_intermediate_size;
  const bool bias = source.config.moe.bias;
  std::vector<ExpertWeights> experts;
  for (int expert = 0; expert < source.config.moe.num_experts; ++expert) {
    const std::string name = module + std::to_string(expert) + ".";
    auto gate_up =
        source.reader.Linear({{name + names.gate, width}, {name + names.up, width}}, hidden, bias, source.store);
    auto down = source.reader.Linear({{name + names.down, hidden}}, width, bias, source.store);
    experts.push_back({.gate_up = std::move(gate_up), .down = std::move(down)});
  }
  return experts;
}

}  // namespace

std::vector<ExpertWeights> ReadExperts(const BlockSource& source, const std::string& module) {
  const int64_t hidden = source.config.hidden, width = source.config.moe.moe_intermediate_size;
  const std::string gate_up = module + "gate_up_proj", down = module + "down_proj";
  if (!source.reader.HasPrefix(gate_up)) {
    const bool w = source.reader.HasPrefix(module + "0.w1.");
    return ReadModules(source, module,
                       w ? ModuleNames{"w1", "w3", "w2"} : ModuleNames{"gate_proj", "up_proj", "down_proj"});
  }
  const auto gate_up_row = [&](int64_t row) { return GateUpRow(source, row); };
  const auto same_row = [](int64_t row) { return row; };
  const bool mxfp4 = source.reader.HasPrefix(gate_up + "_blocks");
  auto gate_ups = mxfp4 ? ReadMxfp4(source, gate_up, 2 * width, hidden, gate_up_row)
                        : ReadFused(source, gate_up, 2 * width, hidden, gate_up_row);
  auto downs =
      mxfp4 ? ReadMxfp4(source, down, hidden, width, same_row) : ReadFused(source, down, hidden, width, same_row);
  std::vector<ExpertWeights> experts;
  for (size_t i = 0; i < gate_ups.size(); ++i) {
    experts.push_back({.gate_up = std::move(gate_ups[i]), .down = std::move(downs[i])});
  }
  return experts;
}

}  // namespace kvanta::models
