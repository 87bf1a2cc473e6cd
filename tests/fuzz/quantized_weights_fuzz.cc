// A module of a quantized checkpoint: its configuration, and its tensors in any types and shapes. The input:
//
//   OUT IN                         shape of the weight
//   {...}                          quantization_config, or hf_quant_config.json ("quantization" in it)
//   weight F8_E4M3 16 256          a line for each tensor: rest of its name, type, shape
//                                  an empty line, then the tensors' bytes, which repeat if they are too few
#include <array>
#include <charconv>
#include <cstring>
#include <memory>
#include <vector>

#include "base/json.h"
#include "fuzz/fuzz_input.h"
#include "weights/quantized/quantized_weights.h"

using namespace kvanta;  // NOLINT(google-build-using-namespace)

namespace {

using weights::CodeType;

constexpr const char* kModule = "model.layers.0.self_attn.q_proj";
constexpr int64_t kMaxSize = 512, kMaxTensors = 16, kMaxTensorBytes = 1 << 19;

std::string_view TakeUntil(std::string_view& text, char end) {
  const std::string_view taken = text.substr(0, text.find(end));
  text.remove_prefix(std::min(text.size(), taken.size() + 1));
  return taken;
}

// A number up to `max`; 0 for anything else.
int64_t Number(std::string_view text, int64_t max) {
  int64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value < 0 || value > max ? 0 : value;
}

// 0 for types that safetensors files do not have.
int64_t BytesOf(std::string_view type) {
  if (type == "I64" || type == "F64") return 8;
  if (type == "F32" || type == "I32") return 4;
  if (type == "F16" || type == "BF16" || type == "I16") return 2;
  return type == "F8_E4M3" || type == "F8_E5M2" || type == "F8_E8M0" || type == "U8" || type == "I8" ? 1 : 0;
}

// Tensors as a reader of files makes them: the size is that of type and shape. None is aligned, and each has memory of
// its own, so that the sanitizers notice accesses past its end.
class Module {
 public:
  explicit Module(std::string_view text) {
    std::string_view lines = text;
    std::vector<std::pair<std::string, weights::TensorView>> tensors;
    for (std::string_view line = TakeUntil(lines, '\n'); !line.empty() && std::ssize(tensors) < kMaxTensors;
         line = TakeUntil(lines, '\n')) {
      weights::TensorView view;
      const std::string name = std::string(kModule) + "." + std::string(TakeUntil(line, ' '));
      view.dtype = TakeUntil(line, ' ');
      int64_t bytes = BytesOf(view.dtype);
      while (!line.empty()) {
        view.shape.push_back(Number(TakeUntil(line, ' '), kMaxTensorBytes));
        bytes *= view.shape.back();
        if (bytes > kMaxTensorBytes) return;
      }
      if (BytesOf(view.dtype) == 0) continue;
      memory_.push_back(std::make_unique<uint8_t[]>(static_cast<size_t>(bytes) + 1));
      view.data = {memory_.back().get() + 1, static_cast<size_t>(bytes)};
      tensors.emplace_back(name, std::move(view));
    }
    size_t next = 0;
    for (auto& [name, view] : tensors) {
      for (uint8_t& byte : std::span(const_cast<uint8_t*>(view.data.data()), view.data.size())) {
        byte = lines.empty() ? 0 : static_cast<uint8_t>(lines[next++ % lines.size()]);
      }
      tensors_.emplace(name, std::move(view));
    }
  }

  weights::TensorMap Tensors() const { return tensors_; }

 private:
  std::vector<std::unique_ptr<uint8_t[]>> memory_;
  weights::TensorMap tensors_;
};

weights::QuantizationConfig ReadConfig(std::string_view text) {
  const Json json = ParseJson(text, "fuzz");
  const JsonObject object(json, "fuzz");
  return object.Has("quantization") ? weights::ReadHfQuantConfig(object) : weights::ReadQuantizationConfig(object);
}

// Checks of an accepted weight that kernels rely on.
void Check(const weights::QuantizedWeight& weight) {
  const auto in = static_cast<size_t>(weight.In());
  std::vector<float> row(in), by_codes(in);
  const bool has_codes = weight.Format().codes != CodeType::kNone;
  if (has_codes && weight.Format().group < 1) __builtin_trap();
  const size_t groups = has_codes ? static_cast<size_t>(weight.Groups()) : 0;
  std::vector<uint8_t> codes(in), zeros(groups), scale_codes(groups);
  std::vector<bool> seen(in, false);
  for (const int32_t column : weight.Order()) {
    if (column < 0 || column >= weight.In() || seen[static_cast<size_t>(column)]) __builtin_trap();
    seen[static_cast<size_t>(column)] = true;
  }
  if (!weight.Order().empty() && weight.Order().size() != in) __builtin_trap();
  for (int64_t i = 0; i < weight.Out(); ++i) {
    weight.DequantizeRow(i, row.data());
    if (!has_codes) continue;
    weight.ReadCodes(i, codes.data());
    if (weight.Format().scales != weights::GroupScale::kF32) weight.ReadScaleCodes(i, scale_codes.data());
    if (weight.Format().codes == CodeType::kInt4) {
      weight.ReadZeros(i, zeros.data());
      for (const uint8_t zero : zeros) {
        if (zero > 16) __builtin_trap();
      }
    }
    const bool is_four_bit = weight.Format().codes != CodeType::kE4M3 && weight.Format().codes != CodeType::kInt8;
    for (const uint8_t code : codes) {
      if (is_four_bit && code > 15) __builtin_trap();
    }
    weight.QuantizedWeight::DequantizeRow(i, by_codes.data());  // the definition by codes and scales
    if (std::memcmp(row.data(), by_codes.data(), in * sizeof(float)) != 0) __builtin_trap();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static ThreadPool threads(1);
  std::string_view text = fuzz::Text({data, size});
  std::string_view shape = TakeUntil(text, '\n');
  const int64_t out = std::max<int64_t>(1, Number(TakeUntil(shape, ' '), kMaxSize));
  const int64_t in = std::max<int64_t>(1, Number(shape, kMaxSize));
  const std::string_view config_text = TakeUntil(text, '\n');
  const Module module(text);
  fuzz::MustReadOrRefuse([&] {
    const weights::QuantizationConfig config = ReadConfig(config_text);
    if (config.IsIgnored(kModule)) return;
    const auto checkpoint = weights::Checkpoint::OfTensors(module.Tensors(), "fuzz");
    const weights::FoundWeight found = weights::FindQuantizedWeight(checkpoint, config, kModule, out, in, threads);
    if (!found.weight) return;
    if (found.weight->Out() != out || found.weight->In() != in) __builtin_trap();
    for (const std::string& name : found.tensors) {
      if (checkpoint.Find(name) == nullptr) __builtin_trap();
    }
    Check(*found.weight);
  });
  return 0;
}
