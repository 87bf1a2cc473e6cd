// What a format's type may leave out, and the run-time view made of it. A format is a type with
//
//   kName, kSummary, kRule, kCode               always
//   kAliases, kScale, kBlock, kBlockScaleBytes, kTokenScaleBytes, kHadamard, kExact, kSinkPages
//                                               where they differ from FormatTraits
//   EncodeRow, DecodeRow                        as Format::encode_row and Format::decode_row
//
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "formats/format.h"

namespace kvanta::formats {

struct FormatTraits {
  static constexpr std::array<std::string_view, 0> kAliases = {};
  static constexpr Scale kScale = Scale::kNone;
  static constexpr int kBlock = 0;
  static constexpr int kBlockScaleBytes = 0;
  static constexpr int kTokenScaleBytes = 0;
  static constexpr bool kHadamard = false;
  static constexpr ExactPages kExact = ExactPages::kNone;
  static constexpr int kSinkPages = 0;
};

template <class T>
constexpr Format MakeFormat() noexcept {
  static_assert((T::kBlock != 0) == (T::kBlockScaleBytes != 0));
  static_assert(T::kSinkPages == 0 || T::kExact == ExactPages::kOpen, "sinks are exact pages");
  return Format{.name = T::kName,
                .aliases = T::kAliases,
                .summary = T::kSummary,
                .rule = T::kRule,
                .code = T::kCode,
                .code_bits = CodeBits(T::kCode),
                .scale = T::kScale,
                .block = T::kBlock,
                .block_scale_bytes = T::kBlockScaleBytes,
                .token_scale_bytes = T::kTokenScaleBytes,
                .hadamard = T::kHadamard,
                .exact = T::kExact,
                .sink_pages = T::kSinkPages,
                .encode_row = &T::EncodeRow,
                .decode_row = &T::DecodeRow};
}

}  // namespace kvanta::formats
