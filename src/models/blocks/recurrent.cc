// Choice of the block of a layer with a state.
#include "models/blocks/layer_blocks.h"

namespace kvanta::models {

std::unique_ptr<AttentionBlock> ReadRecurrent(const BlockSource& source, const LayerSpec& spec,
                                              const std::string& prefix) {
  switch (spec.recurrent) {
    case RecurrentKind::kNone:
    case RecurrentKind::kCompressor:
      break;
    case RecurrentKind::kGatedDeltaNet:
      return ReadGatedDeltaNet(source, prefix);
    case RecurrentKind::kKimiDelta:
      return ReadKimiDelta(source, prefix);
    case RecurrentKind::kShortConv:
      return ReadShortConv(source, prefix);
    case RecurrentKind::kMamba2:
      return ReadMamba2(source, prefix);
  }
  return nullptr;
}

}  // namespace kvanta::models
