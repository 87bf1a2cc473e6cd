// Rows of x as operands of a linear layer on a GPU, and the storage of its weights that they depend on: plain data, the
// same for nvcc, the emulation and the host.
#pragma once

#include <cstdint>

namespace kvanta::kernels::cuda {

inline constexpr int kPanelRows = 16;      // rows of W in a panel: M of a matrix product
inline constexpr int kPanelChannels = 32;  // channels loaded together; one scale per row where W has scales
inline constexpr int kRowTile = 8;         // rows of x: N of a matrix product

// Storage of packed weights (fragment_layout.h): elements; blocks of 32 with fp16 scales among their codes; and codes
// with their scales apart, as quantized checkpoints and GGUF's blocks have them.
enum class PanelKind : uint8_t {
  kBf16,
  kF16,
  kInt8,
  kInt4,
  kE4m3Groups,  // groups of 32 codes or more with an f32 scale
  kInt8Groups,
  kInt4Groups,  // ... and a zero point
  kMxfp4,
  kMxfp8,
  kNvfp4,
  kBlocks4,  // integer codes whose scales and offsets are integers times those of a block
  kBlocks8,
};

// Rows of x as 16-bit B operands: [rows / 8][units][32 lanes][16 bytes].
struct PackedRows {
  uint8_t* codes = nullptr;
  float* unit_sums = nullptr;  // [rows / 8][units][8]: sums of f16 codes
  float* factors = nullptr;    // [rows]: x = code * factor, a power of two
};

// Rows that an operation also packs for the linear layer that reads them.
struct PackTarget {
  bool packs = false;
  PanelKind kind = PanelKind::kBf16;
  PackedRows out;
};

}  // namespace kvanta::kernels::cuda
