#include "models/blocks/decoder_layer.h"

#include <fmt/format.h>

#include <string_view>

#include "models/weights.h"

namespace kvanta::models {

DecoderLayer ReadDecoderLayer(const BlockSource& source, const LayerSpec& spec, const std::string& prefix,
                              const std::string& mlp_prefix) {
  const ModelConfig& config = source.config;
  const auto read_norm = [&](const std::string& module, std::string_view name) {
    if (name.empty()) return Norm();
    return Norm(source.reader, config, fmt::format("{}{}", module, name), config.hidden);
  };
  DecoderLayer layer;
  if (!spec.shares_input) layer.pre_attention_norm = read_norm(prefix, config.names.pre_attention_norm);
  layer.post_attention_norm = read_norm(prefix, config.names.post_attention_norm);
  if (config.hidden_size_per_layer_input != 0) {
    layer.post_per_layer_input_norm = read_norm(prefix, "post_per_layer_input_norm");
  }
  if (config.layer_scalars) layer.scalar = source.reader.KeptValues(prefix + "layer_scalar", 1).front();
  const auto read_attention = spec.IsRecurrent()  ? &ReadRecurrent
                              : config.SharesKv() ? &ReadCompressedAttention
                              : config.UsesMla()  ? &ReadLatentAttention
                                                  : &ReadGroupedAttention;
  layer.attention = read_attention(source, spec, prefix);
  if (!spec.has_mlp) return layer;
  layer.pre_mlp_norm = read_norm(mlp_prefix, config.names.pre_mlp_norm);
  if (spec.moe || !config.names.post_mlp_norm_of_experts) {
    layer.post_mlp_norm = read_norm(mlp_prefix, config.names.post_mlp_norm);
  } else {  // published A.X K1 has weights that are not used
    source.reader.SkipTensors(fmt::format("{}{}.", mlp_prefix, config.names.post_mlp_norm));
  }
  layer.mlp = ReadMlp(source, spec, mlp_prefix);
  return layer;
}

}  // namespace kvanta::models
