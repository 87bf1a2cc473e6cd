#include "base/dtype.h"

#include <fmt/format.h>

#include "base/quote.h"
#include "kvanta/error.h"

namespace kvanta {

std::string_view Name(DType type) noexcept {
  switch (type) {
    case DType::kF32:
      return "float32";
    case DType::kBf16:
      return "bfloat16";
    case DType::kF16:
      return "float16";
  }
  return "unknown";
}

DType ParseDType(std::string_view name) {
  if (name == "float32" || name == "float" || name == "fp32" || name == "f32") return DType::kF32;
  if (name == "bfloat16" || name == "bf16") return DType::kBf16;
  if (name == "float16" || name == "half" || name == "fp16" || name == "f16") return DType::kF16;
  throw InputError(fmt::format("unknown dtype {}; known: float32, bfloat16, float16", Quote(name)));
}

}  // namespace kvanta
