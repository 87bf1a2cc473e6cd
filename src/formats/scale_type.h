// Granularity of a format's scales, and how a scale is stored.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace kvanta::formats {

enum class ScaleType : uint8_t {
  kNone,
  kF32,
  kFp16,
  kE4M3,
  kE8M0,  // a power of two: 2^(byte - 127); 255 is NaN
};

constexpr int Bytes(ScaleType type) noexcept {
  switch (type) {
    case ScaleType::kNone:
      return 0;
    case ScaleType::kF32:
      return 4;
    case ScaleType::kFp16:
      return 2;
    case ScaleType::kE4M3:
    case ScaleType::kE8M0:
      return 1;
  }
  return 0;
}

// As page files and documentation call it.
constexpr std::string_view Name(ScaleType type) noexcept {
  switch (type) {
    case ScaleType::kNone:
      return "none";
    case ScaleType::kF32:
      return "f32";
    case ScaleType::kFp16:
      return "fp16";
    case ScaleType::kE4M3:
      return "e4m3";
    case ScaleType::kE8M0:
      return "e8m0";
  }
  return "unknown";
}

// One stored form covers all formats; what a format lacks is the identity:
//
//   x[t][c] = s_head * s_token[t] * s_block[t][c / block] * value(code) + z_token[t] + z_block[t][c / block]
//   x[t][c] = s_channel[t / group][c] * value(code) + z_channel[t / group][c]                     (token groups)
//   x[t][c] = s_token[t] * s_channel[t / group][c] * value(code)                                  (with channel_bits)
//
// Offsets (z), and the scales of token groups, are fp16; with channel_bits they are powers of 2^(1/4).
struct Scaling {
  bool per_head = false;               // static: one f32 per KV head, outside the page; 1.0 by default
  ScaleType token = ScaleType::kNone;  // per (token, head)
  bool token_offset = false;
  ScaleType block = ScaleType::kNone;  // per `channels` channels of one token
  int channels = 0;
  bool block_offset = false;
  bool allow_partial_block = false;  // a row of fewer channels is one block
  int token_group = 0;        // consecutive tokens of a page that share a scale and an offset per channel; 0: none do
  bool channel_bits = false;  // they share scales and bits of the channels instead (klt_group.h)

  bool operator==(const Scaling&) const = default;
};

// Channels per block scale in rows of head_dim; 0 without blocks.
constexpr int BlockChannels(const Scaling& scaling, int head_dim) noexcept {
  return scaling.allow_partial_block && head_dim < scaling.channels ? head_dim : scaling.channels;
}

// Bytes of the scales of a token group's channels, and of its offsets.
constexpr int64_t GroupScaleBytes(const Scaling& scaling, int head_dim) noexcept {
  if (!scaling.channel_bits) return int64_t{2} * head_dim;
  const int64_t bytes = head_dim / 2 + head_dim / 16;  // 4 bits for each channel, and for each 8 channels
  return (bytes + 15) / 16 * 16;
}
constexpr int64_t GroupOffsetBytes(const Scaling& scaling, int head_dim) noexcept {
  return scaling.channel_bits ? 0 : int64_t{2} * head_dim;
}

// "fp16 with a zero per (token, head)": for --help and documentation. "none" for formats without scales.
std::string DescribeScaling(const Scaling& scaling);

}  // namespace kvanta::formats
