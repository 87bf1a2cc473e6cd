#include "weights/quantized/module_tensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/dtype.h"
#include "base/quote.h"
#include "formats/minifloat.h"
#include "kvanta/error.h"

namespace kvanta::weights {
namespace {

template <class T>
T LoadAt(const TensorView& tensor, size_t i) {
  T value;
  std::memcpy(&value, tensor.data.data() + i * sizeof(T), sizeof(T));
  return value;
}

size_t Count(const TensorView& tensor) {
  size_t count = 1;  // the reader of the file has checked that the product is the byte count
  for (const int64_t size : tensor.shape) count *= static_cast<size_t>(size);
  return count;
}

}  // namespace

std::string ModuleTensors::Name(std::string_view part) const {
  return fmt::format("{}.{}", module_, part);
}

void ModuleTensors::Fail(std::string_view part, const std::string& problem) const {
  throw InputError(fmt::format("{}: tensor {} {}", checkpoint_.Name(), Quote(Name(part)), problem));
}

const TensorView* ModuleTensors::Find(std::string_view part) {
  std::string name = Name(part);
  const TensorView* tensor = checkpoint_.Find(name);
  if (tensor != nullptr) read_.push_back(std::move(name));
  return tensor;
}

const TensorView& ModuleTensors::Get(std::string_view part) {
  if (const TensorView* tensor = Find(part)) return *tensor;
  Fail(part, "is missing: the weight of its module is quantized");
}

const TensorView& ModuleTensors::Get(std::string_view part, std::string_view types,
                                     std::initializer_list<int64_t> shape) {
  const TensorView& tensor = Get(part);
  bool known = false;
  for (size_t begin = 0; begin <= types.size() && !known;) {
    const size_t end = std::min(types.find('|', begin), types.size());
    known = types.substr(begin, end - begin) == tensor.dtype;
    begin = end + 1;
  }
  if (!known || !std::ranges::equal(tensor.shape, shape)) {
    Fail(part, fmt::format("is {} {}; expected {} {}", tensor.dtype, ShapeText(tensor.shape), types,
                           ShapeText({shape.begin(), shape.size()})));
  }
  return tensor;
}

std::vector<float> ModuleTensors::Floats(std::string_view part, bool allow_zero) {
  const TensorView& tensor = Get(part);
  const std::string& type = tensor.dtype;
  const bool is_e8m0 = type == "F8_E8M0";
  if (type != "F32" && type != "F16" && type != "BF16" && !is_e8m0) {
    Fail(part, fmt::format("is stored as {}; expected F32, F16, BF16 or F8_E8M0", type));
  }
  std::vector<float> values(Count(tensor));
  for (size_t i = 0; i < values.size(); ++i) {
    float& value = values[i];
    if (type == "F32") {
      value = LoadAt<float>(tensor, i);
    } else if (is_e8m0) {
      value = formats::E8m0::Decode(tensor.data[i]);
    } else {
      const auto bits = LoadAt<uint16_t>(tensor, i);
      value = type == "BF16" ? Bf16ToFloat(bits) : Fp16ToFloat(bits);
    }
    if (std::isfinite(value) && (value != 0 || allow_zero)) continue;
    Fail(part, fmt::format("has the value {} at index {}; expected finite scales{}", value, i,
                           allow_zero ? "" : " other than 0"));
  }
  return values;
}

std::vector<int32_t> ModuleTensors::Integers(std::string_view part) {
  const TensorView& tensor = Get(part);
  if (tensor.dtype != "I32" && tensor.dtype != "I64") {
    Fail(part, fmt::format("is stored as {}; expected I32 or I64", tensor.dtype));
  }
  std::vector<int32_t> values(Count(tensor));
  for (size_t i = 0; i < values.size(); ++i) {
    const int64_t value = tensor.dtype == "I32" ? LoadAt<int32_t>(tensor, i) : LoadAt<int64_t>(tensor, i);
    if (value < std::numeric_limits<int32_t>::min() || value > std::numeric_limits<int32_t>::max()) {
      Fail(part, fmt::format("has the value {} at index {}, beyond 32 bits", value, i));
    }
    values[i] = static_cast<int32_t>(value);
  }
  return values;
}

void ModuleTensors::IgnoreWeightScales() {
  for (const char* part : {"weight_scale", "weight_zero_point", "weight_g_idx", "weight_global_scale"}) Find(part);
  IgnoreActivations();
}

void ModuleTensors::IgnoreActivations() {
  for (const char* part : {"input_scale", "input_scale_inv", "input_scale_ub", "input_zero_point", "input_global_scale",
                           "output_scale", "output_zero_point", "activation_scale", "weight_format"}) {
    Find(part);
  }
}

}  // namespace kvanta::weights
