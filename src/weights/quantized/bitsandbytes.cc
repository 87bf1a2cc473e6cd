// bitsandbytes with 4 bits: the weight flattened, two codes to a byte, the upper half first; one maximum per block of
// consecutive weights, which may itself be quantized in blocks ("double quantization").
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/json.h"
#include "weights/quantized/quantized_weights.h"

namespace kvanta::weights {
namespace {

constexpr const char* kAbsmax = "weight.absmax";
constexpr const char* kMap = "weight.quant_map";
constexpr const char* kNestedAbsmax = "weight.nested_absmax";
constexpr const char* kNestedMap = "weight.nested_quant_map";

struct Nf4Parts {
  const uint8_t* codes = nullptr;  // [out * in / 2]
  int64_t block = 0;
  std::vector<float> absmax = {};  // one per block
  std::array<float, 16> values{};
};

class Nf4Weight final : public QuantizedWeight {
 public:
  Nf4Weight(const WeightSource& source, Nf4Parts parts)
      : QuantizedWeight(source.out, source.in, {CodeType::kNone, GroupScale::kF32, parts.block}),
        parts_(std::move(parts)) {
    const bool is_nf4 = std::ranges::equal(parts_.values, kNf4Values.of);
    if (is_nf4 && In() % parts_.block == 0) format_.codes = CodeType::kNf4;
  }

  void ReadCodes(int64_t row, uint8_t* codes) const override {
    for (int64_t k = 0; k < In(); ++k) codes[k] = CodeAt(row * In() + k);
  }
  void ReadScales(int64_t row, float* scales) const override {
    std::copy_n(parts_.absmax.begin() + row * In() / parts_.block, Groups(), scales);
  }
  void DequantizeRow(int64_t row, float* out) const override {
    for (int64_t k = 0; k < In(); ++k) {
      const int64_t i = row * In() + k;
      out[k] = parts_.values[CodeAt(i)] * parts_.absmax[static_cast<size_t>(i / parts_.block)];
    }
  }

 private:
  uint8_t CodeAt(int64_t i) const { return i % 2 == 0 ? parts_.codes[i / 2] >> 4 : parts_.codes[i / 2] & 15; }

  Nf4Parts parts_;
};

// The object that bitsandbytes writes as bytes of a tensor.
Json ReadState(ModuleTensors& tensors) {
  const bool nf4 = tensors.Find("weight.quant_state.bitsandbytes__nf4") != nullptr;
  const char* part = nf4 ? "weight.quant_state.bitsandbytes__nf4" : "weight.quant_state.bitsandbytes__fp4";
  const TensorView& tensor = tensors.Get(part);
  return ParseJson({reinterpret_cast<const char*>(tensor.data.data()), tensor.data.size()}, tensors.Name(part));
}

void CheckCount(const ModuleTensors& tensors, std::string_view part, size_t found, int64_t expected) {
  if (static_cast<int64_t>(found) == expected) return;
  tensors.Fail(part, fmt::format("has {} values; expected {}", found, expected));
}

std::vector<float> ReadAbsmax(ModuleTensors& tensors, const JsonObject& state, int64_t blocks) {
  const TensorView& tensor = tensors.Get(kAbsmax);
  if (tensor.dtype != "U8") {
    std::vector<float> absmax = tensors.Floats(kAbsmax, true);
    CheckCount(tensors, kAbsmax, absmax.size(), blocks);
    return absmax;
  }
  CheckCount(tensors, kAbsmax, tensor.data.size(), blocks);
  const int64_t block = state.Int("nested_blocksize", 1, int64_t{1} << 24, 256);
  const auto offset = static_cast<float>(state.Number("nested_offset", -1e30, 1e30));
  const std::vector<float> maxima = tensors.Floats(kNestedAbsmax, true), map = tensors.Floats(kNestedMap, true);
  CheckCount(tensors, kNestedAbsmax, maxima.size(), (blocks + block - 1) / block);
  CheckCount(tensors, kNestedMap, map.size(), 256);
  std::vector<float> absmax;
  for (int64_t i = 0; i < blocks; ++i) {
    const uint8_t code = tensor.data[static_cast<size_t>(i)];
    absmax.push_back(map[code] * maxima[static_cast<size_t>(i / block)] + offset);
  }
  return absmax;
}

}  // namespace

std::unique_ptr<QuantizedWeight> ReadBitsAndBytes4(ModuleTensors& tensors, const WeightSource& source) {
  const Json json = ReadState(tensors);
  const JsonObject state(json, tensors.Name("weight.quant_state"));
  const Json* shape = state.Find("shape");
  if (shape == nullptr || *shape != Json::array({source.out, source.in})) {
    state.Fail("shape", fmt::format("[{}, {}], the shape of the weight", source.out, source.in));
  }
  const int64_t count = source.out * source.in;
  const TensorView& weight = tensors.Get("weight");  // its dtype and shape are those of the storage
  CheckCount(tensors, "weight", weight.data.size() * 2, count + count % 2);
  Nf4Parts parts{.codes = weight.data.data(), .block = state.Int("blocksize", 1, int64_t{1} << 24)};
  parts.absmax = ReadAbsmax(tensors, state, (count + parts.block - 1) / parts.block);
  const std::vector<float> values = tensors.Floats(kMap, true);
  CheckCount(tensors, kMap, values.size(), 16);
  std::ranges::copy(values, parts.values.begin());
  return std::make_unique<Nf4Weight>(source, std::move(parts));
}

}  // namespace kvanta::weights
