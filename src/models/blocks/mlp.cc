// Choice of a layer's MLP.
#include <fmt/format.h>

#include "models/blocks/layer_blocks.h"

namespace kvanta::models {

std::unique_ptr<MlpBlock> ReadMlp(const BlockSource& source, const LayerSpec& spec, const std::string& prefix) {
  const ModelConfig& config = source.config;
  if (spec.moe && config.mlp_beside_experts) return ReadMlpAndExperts(source, spec, prefix);
  const std::string sparse = fmt::format("{}{}.", prefix, config.names.sparse_mlp);
  const bool has_sparse = !config.names.sparse_mlp.empty() && source.reader.HasPrefix(sparse);
  const std::string own = config.names.mlp.empty() ? prefix : fmt::format("{}{}.", prefix, config.names.mlp);
  const bool in_layer = spec.moe && config.names.experts_in_layer;
  const std::string module = in_layer ? prefix : has_sparse ? sparse : own;
  if (spec.moe) return ReadMoe(source, spec, prefix, module);
  if (config.mlp.kind == MlpKind::kUngated) return ReadUngatedMlp(source, module, spec.intermediate_size);
  return ReadGatedMlp(source, module, {.intermediate_size = spec.intermediate_size, .limit = spec.mlp_limit});
}

}  // namespace kvanta::models
