// Defaults of a format's type, and its run-time view. A format is a type with
//
//   kName, kSummary, kRule, kElementType               always
//   kAliases, kScaling, kHadamard, kExact, kSinkPages, kBoundaryLayers, kMlaSupport, kLatentFormat,
//   Values                                      if they differ from FormatTraits
//   EncodeRow, DecodeRow                        as Format::encode_row and Format::decode_row, or, for token groups,
//   EncodeTokenGroup, DecodeTokenGroup                      as Format::encode_token_group and
//   Format::decode_token_group
//
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "formats/format.h"

namespace kvanta::formats {

struct FormatTraits {
  static constexpr std::array<std::string_view, 0> kAliases = {};
  static constexpr Scaling kScaling = {};
  static constexpr bool kHadamard = false;
  static constexpr ExactPages kExact = ExactPages::kNone;
  static constexpr int kSinkPages = 0;
  static constexpr int kBoundaryLayers = 0;
  static constexpr MlaSupport kMlaSupport = MlaSupport::kNo;
  static constexpr std::string_view kLatentFormat = {};
  using Values = void;  // type of V, if the name means a different one there
};

template <class T>
constexpr Format MakeFormat() noexcept;

// Run-time view of a type that is not in the list: V of a name.
template <class T>
inline constexpr Format kValueSide = MakeFormat<T>();

template <class T>
constexpr Format MakeFormat() noexcept {
  constexpr Scaling kScaling = T::kScaling;
  static_assert((kScaling.channels != 0) == (kScaling.block != ScaleType::kNone));
  static_assert(kScaling.block != ScaleType::kNone || !kScaling.block_offset);
  static_assert(
      kScaling.token_group == 0 || kScaling == Scaling{.token_group = kScaling.token_group} ||
          kScaling == Scaling{.token = ScaleType::kFp16, .token_group = kScaling.token_group, .channel_bits = true},
      "token groups have no other scales");
  static_assert(kScaling.token_group == 0 || T::kExact == ExactPages::kOpen,
                "a token group is encoded when its page closes");
  static_assert(T::kMlaSupport == MlaSupport::kNo ||
                (!T::kHadamard && !kScaling.per_head && kScaling.token_group == 0));
  static_assert(T::kSinkPages == 0 || T::kExact == ExactPages::kOpen, "sinks are exact pages");
  Format format{.name = T::kName,
                .aliases = T::kAliases,
                .summary = T::kSummary,
                .rule = T::kRule,
                .code = T::kElementType,
                .code_bits = CodeBits(T::kElementType),
                .scaling = kScaling,
                .hadamard = T::kHadamard,
                .exact = T::kExact,
                .sink_pages = T::kSinkPages,
                .boundary_layers = T::kBoundaryLayers,
                .latents = T::kMlaSupport,
                .latent_format = T::kLatentFormat,
                .encode_row = nullptr,
                .decode_row = nullptr,
                .encode_token_group = nullptr,
                .decode_token_group = nullptr,
                .value_side = nullptr};
  if constexpr (kScaling.token_group == 0) {
    format.encode_row = &T::EncodeRow;
    format.decode_row = &T::DecodeRow;
  } else {
    format.encode_token_group = &T::EncodeTokenGroup;
    format.decode_token_group = &T::DecodeTokenGroup;
  }
  if constexpr (!std::is_void_v<typename T::Values>) format.value_side = &kValueSide<typename T::Values>;
  return format;
}

}  // namespace kvanta::formats
