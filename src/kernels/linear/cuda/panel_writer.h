// Packs rows of W into the panels of fragment_layout.h, on the host.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string_view>

#include "kernels/linear/cuda/fragment_layout.h"
#include "weights/quantized_weight.h"
#include "weights/weight_blocks.h"
#include "weights/weight_view.h"

namespace kvanta::kernels::cuda {

// Panels that keep a format of quantized checkpoints; none: its weights become bf16.
std::optional<PanelKind> PanelKindOf(const weights::KernelFormat& format) noexcept;

// True if panels of this kind keep the codes and scales of blocks as they are.
bool KeepsBlocks(PanelKind kind, weights::BlockFormat format) noexcept;

// "bf16", "int4", "MXFP4", ...
std::string_view Name(PanelKind kind) noexcept;

// A row of W: one of a view, or of a quantized weight.
struct RowSource {
  const weights::WeightView* view = nullptr;
  const weights::QuantizedWeight* quantized = nullptr;
  int64_t index = 0;
};

class PanelWriter {
 public:
  // weight: kind, in, and group_shift of quantized weights.
  explicit PanelWriter(const Weight& weight);

  // Bytes of a panel's codes, of its scales and of their factors.
  struct Sections {
    int64_t codes = 0, scales = 0, factors = 0;
  };
  Sections BytesOfPanel() const noexcept;

  struct Panel {
    uint8_t *codes, *scales, *factors;
  };
  // Writes row `row` of a panel, whose bytes are zero before. May run for several rows at once.
  void Write(const RowSource& from, int row, const Panel& to);

  // Throws InputError if a scale of the rows so far was not finite as it is stored.
  void CheckFinite() const;

 private:
  void WriteElements(const float* x, int row, uint8_t* codes) const;
  void WriteStoredBlocks(const RowSource& from, int row, uint8_t* codes);
  void WriteUnits(const float* x, int row, uint8_t* codes);
  void WriteBlock(weights::WeightBlock block, int row, uint8_t* unit);
  void WriteUnpacked(const RowSource& from, int row, const Panel& to);
  void WriteMxfp4(const RowSource& from, int row, const Panel& to);
  void WriteQuantized(const RowSource& from, int row, const Panel& to);
  void SetCode(int64_t channel, int row, uint8_t code, uint8_t* codes) const noexcept;
  void SetFloat(float value, uint8_t* to) noexcept;

  const Weight& weight_;
  FragmentOffset offsets_[kPanelRows][kPanelChannels];
  std::atomic<bool> non_finite_ = false;
};

}  // namespace kvanta::kernels::cuda
