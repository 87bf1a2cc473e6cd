// Sources of static KV scales, in order of precedence (docs/scales.md). A set that lacks a scale is an error.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/scheme.h"
#include "models/config/config.h"
#include "weights/safetensors.h"

namespace kvanta::models {

enum class ScaleSource : uint8_t { kNone, kFile, kCheckpoint };

struct KvScales {
  ScaleSource source = ScaleSource::kNone;
  std::vector<formats::LayerScales>
      layers;             // per layer; scale.size() == kv_heads; means, matrices, outliers: K's, where given
  std::string note = {};  // for the user, where scales were converted; else ""
};

// Scale file: the known schema (kv_cache.scaling_factor by TP rank and layer), Kvanta's own ("kvanta_kv_scales": 1), or
// a safetensors file whose metadata holds Kvanta's own and whose tensors are the matrices of +query.
// `fingerprint` is the model's (fingerprint.h); "" skips the comparison with the file's.
// Throws InputError with the reason: unknown schema, missing layer or rank, not finite, not > 0, wrong model.
KvScales ParseScaleFile(std::string_view file, const std::string& name, const ModelConfig& config,
                        std::string_view fingerprint = "");
// The same for the file at a path, of at most 1 GiB, or 100 MB of JSON.
KvScales ReadScaleFile(const std::string& path, const ModelConfig& config, std::string_view fingerprint = "");

// Use of scales by a cache.
struct ScaleUse {
  std::span<const formats::LayerScheme> layers;  // [layers], or empty: all layers need scales
  bool measured = false;                         // scales will be measured: those of the checkpoint are not read
};

// The checkpoint's tensors, under every name of docs/scales.md; kNone with 1.0 when it has none, or declares an NVFP4
// cache (another convention). Throws InputError for a malformed one, for a set that lacks some, and for scales of a
// declared format that is not known. A checkpoint that declares single layers has scales for these; the others have
// 1.0, unless a layer of `use` needs one, which is an error.
KvScales ReadScaleTensors(const weights::Checkpoint& checkpoint, const ModelConfig& config, const ScaleUse& use = {});

// The file if `quantization_param_path` is set, else ReadScaleTensors(). Call it only if some layer has static scales:
// a checkpoint that lacks one must not stop a cache that needs none.
KvScales LoadKvScales(const std::string& quantization_param_path, const weights::Checkpoint& checkpoint,
                      const ModelConfig& config, const ScaleUse& use = {});

// Matrices of +query from a tensor [kv_heads, head_dim, head_dim], F32. Throws InputError naming the tensor.
std::shared_ptr<const formats::QueryTransform> ReadQueryMatrices(const weights::TensorView& tensor,
                                                                 const std::string& name, const LayerSpec& layer);

// Eigen-channels of keys from a tensor [kv_heads, head_dim + 1, head_dim], F32: the last row of a head has its
// deviations. Throws InputError naming the tensor.
std::shared_ptr<const formats::EigenChannels> ReadEigenChannels(const weights::TensorView& tensor,
                                                                const std::string& name, const LayerSpec& layer);

// True for a scale that float32 holds with its reciprocal as normal numbers.
bool IsScale(float scale) noexcept;
inline constexpr std::string_view kScaleRange = "a number above 0, from 1.2e-38 to 8.5e37";

// All layers at 1.0, no means.
std::vector<formats::LayerScales> UnitScales(const ModelConfig& config);

}  // namespace kvanta::models
