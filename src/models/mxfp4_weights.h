// Experts in MXFP4 as GPT-OSS publishes them: blocks of 32 weights along a row with codes of e2m1, the even weight of a
// pair in the low half of a byte, and a scale of e8m0 (OCP Microscaling Formats 1.0).
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "models/weights.h"

namespace kvanta::models {

class Mxfp4Tensor {
 public:
  // Tensors `name`_blocks U8 [experts][out][in / 32][16] and `name`_scales U8 [experts][out][in / 32]. Throws
  // InputError for other types and shapes, and for scales whose values are not finite in bf16.
  Mxfp4Tensor(WeightReader& reader, const std::string& name, int64_t experts, int64_t out, int64_t in);

  // A row as bf16 [in], exact.
  void DecodeRow(int64_t expert, int64_t row, uint16_t* values) const noexcept;
  // A row as blocks of BlockFormat::kMXFP4, [in / 32].
  void CopyRow(int64_t expert, int64_t row, uint8_t* blocks) const noexcept;

 private:
  int64_t out_, row_blocks_;
  std::span<const uint8_t> codes_, scales_;
};

}  // namespace kvanta::models
