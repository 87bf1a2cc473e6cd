#include "formats/names.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/quote.h"
#include "formats/format.h"
#include "kvanta/error.h"

namespace kvanta::formats {
namespace {

constexpr std::string_view kBlockEight = "other bytes than any format here; int8_g32 (8.5 bits) is the nearest";
constexpr std::string_view kIntegerEight = "other bytes than any format here; int8 (8.1 bits) is the nearest";
constexpr std::string_view kBlockFive = "other bytes than any format here; int5_g32 (5.5 bits) is the nearest";
constexpr std::string_view kBlockFour =
    "other bytes than any format here; int4 (blocks of 32, 4.5 bits) is the nearest";
constexpr std::string_view kModelDtype = "stands for the model's own dtype; write auto, bf16, fp16 or fp32";

constexpr std::array kCompatNames = {
    CompatName{"fp8_inc", "vLLM", "fp8_e4m3", ""},  // Gaudi
    CompatName{"nvfp4_ds_mla", "vLLM", "mla_nvfp4", ""},
    CompatName{"fp8_k_nvfp4_v", "ModelOpt", "k=fp8_e4m3,v=nvfp4", ""},
    CompatName{"ultraquant_4bit", "vLLM", "k=mxfp4+hadamard,v=mxfp4", ""},
    CompatName{"float8_e4m3fn", "PyTorch", "fp8_e4m3", ""},
    CompatName{"e4m3", "PyTorch", "fp8_e4m3", ""},
    CompatName{"float8_e5m2", "PyTorch", "fp8_e5m2", ""},
    CompatName{"e5m2", "PyTorch", "fp8_e5m2", ""},
    CompatName{"fp4_mx_block32", "SGLang", "", "mxfp4 has such blocks, with OCP's exponents"},
    // LMDeploy's quant_policy, by number.
    CompatName{"0", "LMDeploy", "", kModelDtype},
    CompatName{"none", "LMDeploy", "", kModelDtype},
    CompatName{"4", "LMDeploy", "int4", ""},
    CompatName{"8", "LMDeploy", "int8", ""},
    CompatName{"16", "LMDeploy", "fp8_e4m3", ""},
    CompatName{"17", "LMDeploy", "fp8_e5m2", ""},
    CompatName{"42", "LMDeploy", "", "its TurboQuant; turboquant_4bit_nc and turboquant_3bit_nc are the nearest"},
    CompatName{"u8", "OpenVINO", "", kIntegerEight},
    CompatName{"u4", "OpenVINO", "", kBlockFour},
    CompatName{"Q8", "ExLlamaV2", "", kIntegerEight},
    CompatName{"Q6", "ExLlamaV2", "", "other bytes than any format here; int6_g32 (6.5 bits) is the nearest"},
    CompatName{"Q4", "ExLlamaV2", "", kBlockFour},
    // llama.cpp's block formats: a name there is an exact layout of bytes, so none is silently replaced.
    CompatName{"q8_0", "llama.cpp", "", kBlockEight},
    CompatName{"q5_1", "llama.cpp", "", kBlockFive},
    CompatName{"q5_0", "llama.cpp", "", kBlockFive},
    CompatName{"q4_1", "llama.cpp", "", kBlockFour},
    CompatName{"q4_0", "llama.cpp", "", kBlockFour},
    CompatName{"iq4_nl", "llama.cpp", "", kBlockFour},
};

// Name without its variant: "int2" of int2_g32.
bool IsStem(std::string_view stem, std::string_view name) {
  return !stem.empty() && name.starts_with(stem) && name.substr(stem.size()).starts_with('_');
}

// The name that `typed` was most likely meant to be, or "".
std::string_view NearestName(std::string_view typed) {
  constexpr size_t kLongest = 80;
  if (typed.size() > kLongest) return {};
  std::string name(typed);
  std::ranges::transform(name, name.begin(),
                         [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c | 32) : c; });
  if (const Format* same = FindOrNull(name)) return same->name;
  for (const Format& format : All()) {
    if (IsStem(name, format.name)) return format.name;
  }
  std::string_view nearest;
  // More than two edits make a different word, of a short name more than one in three letters.
  size_t min_distance = std::min<size_t>(3, 1 + name.size() / 3);
  const auto consider = [&](std::string_view candidate) {
    const size_t distance = EditDistance(name, candidate);
    if (distance < min_distance && distance < candidate.size()) {
      min_distance = distance;
      nearest = candidate;
    }
  };
  consider("auto");
  for (const Format& format : All()) {
    consider(format.name);
    for (const std::string_view alias : format.aliases) consider(alias);
  }
  return nearest;
}

}  // namespace

std::span<const CompatName> CompatNames() noexcept {
  return kCompatNames;
}

const CompatName* FindCompatName(std::string_view name) noexcept {
  const auto* found =
      std::find_if(kCompatNames.begin(), kCompatNames.end(), [&](const auto& entry) { return entry.name == name; });
  return found == kCompatNames.end() ? nullptr : &*found;
}

std::string NamesOf(const std::function<bool(const Format&)>& fits) {
  std::string names;
  for (const Format& format : All()) {
    if (!fits(format)) continue;
    names += names.empty() ? "" : ", ";
    names += format.name;
  }
  return names;
}

std::string AvailableNames() {
  return "auto, " + NamesOf([](const Format& /*format*/) { return true; }) + ", or k=NAME,v=NAME";
}

void ThrowUnknownName(std::string_view name) {
  const std::string shown = Sanitize(name);
  if (const CompatName* compat = FindCompatName(name); compat != nullptr && !compat->reason.empty()) {
    throw InputError(fmt::format("KV cache format '{}': {}; available: {}", shown, compat->reason, AvailableNames()));
  }
  if (name == "auto") {
    throw InputError(
        fmt::format("KV cache format 'auto' stands for the model's own, for K and V alike, and is resolved "
                    "by the engine; name a format here: {}",
                    NamesOf([](const Format& /*format*/) { return true; })));
  }
  const std::string_view nearest = NearestName(name);
  throw InputError(fmt::format("unknown KV cache format '{}'{}; available: {}", shown,
                               nearest.empty() ? "" : fmt::format(", did you mean '{}'?", nearest), AvailableNames()));
}

}  // namespace kvanta::formats
