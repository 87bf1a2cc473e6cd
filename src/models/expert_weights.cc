#include "models/expert_weights.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/math.h"
#include "models/mxfp4_weights.h"

namespace kvanta::models {
namespace {

using kernels::ExpertWeights;
using kernels::Linear;
using weights::BlockFormat;
using weights::WeightView;

// Indices [first, end).
struct Range {
  int64_t first = 0, end = 0;
};

// This rank's part of `count` things that ranks divide; all of them where they do not.
Range Own(const BlockSource& source, int64_t count, bool divided) {
  if (!divided) return {.first = 0, .end = count};
  const parallel::Partition parts = source.ranks.PartitionOf(count);
  return {.first = parts.Begin(source.ranks.Rank()), .end = parts.Begin(source.ranks.Rank() + 1)};
}

// This rank's experts.
Range OwnExperts(const BlockSource& source) {
  return Own(source, source.config.moe.num_experts, source.expert_parallel);
}

// This rank's rows of each of its experts' matrices of `out` rows.
Range OwnRows(const BlockSource& source, int64_t out) {
  return Own(source, out, !source.expert_parallel);
}

// Matrices of one kind, of all experts in one tensor.
struct FusedWeight {
  std::string name;
  int64_t out = 0, in = 0;
  std::vector<int64_t> rows;  // rows that this rank keeps, in its order
};

// Channels of the experts' inputs and outputs.
int64_t ExpertIo(const BlockSource& source) {
  const int64_t latent = source.config.moe.moe_latent_size;
  return latent != 0 ? latent : source.config.hidden;
}

// Rows of gate, then rows of up.
FusedWeight GateUp(const BlockSource& source, const std::string& name) {
  const int64_t width = source.config.moe.moe_intermediate_size;
  const bool interleaved = source.config.names.interleaved_gate_up;
  const Range own = OwnRows(source, width);
  FusedWeight weight{.name = name, .out = 2 * width, .in = ExpertIo(source), .rows = {}};
  for (const int64_t half : {0, 1}) {
    for (int64_t row = own.first; row < own.end; ++row) {
      weight.rows.push_back(interleaved ? 2 * row + half : half * width + row);
    }
  }
  return weight;
}

FusedWeight Down(const BlockSource& source, const std::string& name) {
  const int64_t out = ExpertIo(source);
  const Range own = OwnRows(source, out);
  FusedWeight weight{.name = name, .out = out, .in = source.config.moe.moe_intermediate_size, .rows = {}};
  for (int64_t row = own.first; row < own.end; ++row) weight.rows.push_back(row);
  return weight;
}

// Biases of an expert's rows; none without biases. `values`: [experts][out].
std::vector<float> Biases(const std::vector<float>& values, int64_t expert, const FusedWeight& weight) {
  std::vector<float> biases;
  if (values.empty()) return biases;
  for (const int64_t row : weight.rows) biases.push_back(values[static_cast<size_t>(expert * weight.out + row)]);
  return biases;
}

// Views of the rows, which are in order in the checkpoint: one for each run of adjacent rows.
std::vector<WeightView> ViewsOf(const WeightView& all, const std::vector<int64_t>& rows) {
  std::vector<WeightView> views;
  for (size_t first = 0, end = 0; first < rows.size(); first = end) {
    end = first + 1;
    while (end < rows.size() && rows[end] == rows[end - 1] + 1) ++end;
    views.push_back(all.Rows(rows[first], static_cast<int64_t>(end - first)));
  }
  return views;
}

std::vector<float> ReadBiases(const BlockSource& source, const std::string& name, int64_t out) {
  if (!source.config.moe.bias) return {};
  const int64_t experts = source.config.moe.num_experts;
  const WeightView view = source.reader.Elements(name, std::array{experts, out}, kernels::WeightType::kF32);
  std::vector<float> values;
  for (int64_t i = 0; i < experts * out; ++i) values.push_back(ElementValue(view, i));
  return values;
}

// out[i][k] = in[k][weight.rows[i]]: 16-bit or 32-bit elements in their type.
template <class Element>
void Transpose(const Element* in, const FusedWeight& weight, ThreadPool& threads, Element* out) {
  constexpr int64_t kRows = 32;  // at once, so that whole lines are read
  const int64_t rows = std::ssize(weight.rows), width = weight.in;
  auto transpose = [&](int64_t task, int) {
    const int64_t first = task * kRows, end = std::min(rows, first + kRows);
    for (int64_t k = 0; k < width; ++k) {
      for (int64_t i = first; i < end; ++i) {
        out[i * width + k] = in[k * weight.out + weight.rows[static_cast<size_t>(i)]];
      }
    }
  };
  threads.ForEach(CeilDiv(rows, kRows), transpose);
}

// [experts][in][out] or [experts][out][in].
std::vector<std::unique_ptr<Linear>> ReadFused(const BlockSource& source, const FusedWeight& weight) {
  const int64_t experts = source.config.moe.num_experts, out = weight.out, in = weight.in;
  const std::vector<float> biases = ReadBiases(source, weight.name + "_bias", out);
  const std::array out_first{experts, out, in}, in_first{experts, in, out};
  const TensorNames& names = source.config.names;
  const bool transposed =
      names.expert_order == ExpertOrder::kInOut ||
      (names.expert_order == ExpertOrder::kByShape && !source.reader.HasShape(weight.name, out_first));
  const WeightView all = source.reader.Elements(weight.name, transposed ? in_first : out_first, source.store);
  const int64_t bytes = out * in * SizeOf(all.dtype);
  std::vector<uint32_t> matrix(transposed ? static_cast<size_t>(CeilDiv(bytes, sizeof(uint32_t))) : 0);
  std::vector<std::unique_ptr<Linear>> layers;
  const Range own = OwnExperts(source);
  for (int64_t expert = own.first; expert < own.end; ++expert) {
    const uint8_t* data = static_cast<const uint8_t*>(all.data) + expert * bytes;
    const WeightView view{.data = data, .dtype = all.dtype, .out = out, .in = in, .module = weight.name};
    if (!transposed) {
      layers.push_back(source.reader.Pack(ViewsOf(view, weight.rows), Biases(biases, expert, weight), source.store));
      continue;
    }
    if (all.dtype == DType::kF32) {
      Transpose(reinterpret_cast<const uint32_t*>(data), weight, source.ops.threads(), matrix.data());
    } else {
      Transpose(reinterpret_cast<const uint16_t*>(data), weight, source.ops.threads(),
                reinterpret_cast<uint16_t*>(matrix.data()));
    }
    WeightView rows = view;
    rows.data = matrix.data();
    rows.out = std::ssize(weight.rows);
    layers.push_back(source.reader.Pack(std::span(&rows, 1), Biases(biases, expert, weight), source.store));
  }
  return layers;
}

// The same in MXFP4, [experts][out][in / 32][16] of codes and [experts][out][in / 32] of scales. Kept as they are,
// or expanded to bf16, which is exact.
std::vector<std::unique_ptr<Linear>> ReadMxfp4(const BlockSource& source, const FusedWeight& weight) {
  const int64_t in = weight.in, rows = std::ssize(weight.rows);
  const std::vector<float> biases = ReadBiases(source, weight.name + "_bias", weight.out);
  const Mxfp4Tensor tensor(source.reader, weight.name, source.config.moe.num_experts, weight.out, in);
  const bool keep = source.reader.KeepsQuantized(source.store);
  const int64_t row_bytes = keep ? weights::RowBytes(BlockFormat::kMXFP4, in) : in * SizeOf(DType::kBf16);
  std::vector<uint16_t> matrix(static_cast<size_t>(CeilDiv(rows * row_bytes, sizeof(uint16_t))));
  const WeightView view{.data = matrix.data(),
                        .dtype = DType::kBf16,
                        .out = rows,
                        .in = in,
                        .blocks = keep ? BlockFormat::kMXFP4 : BlockFormat::kNone,
                        .module = weight.name};
  std::vector<std::unique_ptr<Linear>> layers;
  const Range own = OwnExperts(source);
  for (int64_t expert = own.first; expert < own.end; ++expert) {
    auto read = [&](int64_t i, int) {
      const int64_t row = weight.rows[static_cast<size_t>(i)];
      uint8_t* bytes = reinterpret_cast<uint8_t*>(matrix.data()) + i * row_bytes;
      if (keep) {
        tensor.CopyRow(expert, row, bytes);
      } else {
        tensor.DecodeRow(expert, row, reinterpret_cast<uint16_t*>(bytes));
      }
    };
    source.ops.threads().ForEach(rows, read);
    layers.push_back(source.reader.Pack(std::span(&view, 1), Biases(biases, expert, weight),
                                        keep ? kernels::WeightType::kStored : source.store));
  }
  return layers;
}

struct ModuleNames {
  const char *gate, *up, *down;
};

std::vector<ExpertWeights> ReadModules(const BlockSource& source, const std::string& module, const ModuleNames& names) {
  const int64_t hidden = ExpertIo(source), width = source.config.moe.moe_intermediate_size;
  const bool bias = source.config.moe.bias;
  const bool whole = source.expert_parallel;
  std::vector<ExpertWeights> experts;
  const Range own = OwnExperts(source);
  for (int64_t expert = own.first; expert < own.end; ++expert) {
    const std::string name = module + std::to_string(expert) + ".";
    const StackedWeight gate{.module = name + names.gate, .out = width, .whole = whole};
    const StackedWeight up{.module = name + names.up, .out = width, .whole = whole};
    auto gate_up = source.config.moe.gated ? source.reader.Linear({gate, up}, hidden, bias, source.store)
                                           : source.reader.Linear({up}, hidden, bias, source.store);
    auto down =
        source.reader.Linear({{.module = name + names.down, .out = hidden, .whole = whole}}, width, bias, source.store);
    experts.push_back({.gate_up = std::move(gate_up), .down = std::move(down)});
  }
  for (int64_t expert = 0; expert < source.config.moe.num_experts; ++expert) {
    const bool others = expert < own.first || expert >= own.end;
    if (others) source.reader.SkipTensors(module + std::to_string(expert) + ".");
  }
  return experts;
}

}  // namespace

std::vector<ExpertWeights> ReadExperts(const BlockSource& source, const std::string& module) {
  const std::string gate_up = module + std::string(source.config.names.fused_gate_up);
  if (!source.reader.HasPrefix(gate_up)) {
    const std::string experts = module + "experts.";
    const bool w = source.reader.HasPrefix(experts + "0.w1.");
    return ReadModules(source, experts,
                       w ? ModuleNames{"w1", "w3", "w2"} : ModuleNames{"gate_proj", "up_proj", "down_proj"});
  }
  const auto read = source.reader.HasPrefix(gate_up + "_blocks") ? ReadMxfp4 : ReadFused;
  auto gate_ups = read(source, GateUp(source, gate_up));
  auto downs = read(source, Down(source, module + std::string(source.config.names.fused_down)));
  std::vector<ExpertWeights> experts;
  for (size_t i = 0; i < gate_ups.size(); ++i) {
    experts.push_back({.gate_up = std::move(gate_ups[i]), .down = std::move(downs[i])});
  }
  return experts;
}

}  // namespace kvanta::models
