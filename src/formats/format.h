// The run-time view of a number format: what every other layer sees. Each format is a type in its own file
// (src/formats/<name>.h) and one line in all.h; this view is derived from the type by MakeFormat<T>() there.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "kvanta/kv_scheme.h"

namespace kvanta::formats {

// How one element is stored in the codes plane. Kernels dispatch on this, once, at plan time.
enum class Code : uint8_t {
  kFp32,
  kBf16,
  kFp16,
  kE4M3,
  kE5M2,
  kInt8,  // two's complement
  kInt4,  // offset binary: nibble = code + 8, low nibble = even channel
};

// Bits of one element in the codes plane.
constexpr int CodeBits(Code code) noexcept {
  switch (code) {
    case Code::kFp32:
      return 32;
    case Code::kBf16:
    case Code::kFp16:
      return 16;
    case Code::kE4M3:
    case Code::kE5M2:
    case Code::kInt8:
      return 8;
    case Code::kInt4:
      return 4;
  }
  return 0;
}

// As page files and documentation call it.
constexpr std::string_view Name(Code code) noexcept {
  switch (code) {
    case Code::kFp32:
      return "fp32";
    case Code::kBf16:
      return "bf16";
    case Code::kFp16:
      return "fp16";
    case Code::kE4M3:
      return "e4m3";
    case Code::kE5M2:
      return "e5m2";
    case Code::kInt8:
      return "int8";
    case Code::kInt4:
      return "int4";
  }
  return "unknown";
}

// Where the scale of an element lives.
enum class Scale : uint8_t {
  kNone,      // codes are values
  kStatic,    // one f32 per KV head, outside the page (SideScales); 1.0 when nothing was given
  kPerToken,  // fp16 per (token, head), plane token_scales
  kPerBlock,  // fp16 per block of `block` channels of one token, plane block_scales
};

// As page files and documentation call it.
constexpr std::string_view Name(Scale scale) noexcept {
  switch (scale) {
    case Scale::kNone:
      return "none";
    case Scale::kStatic:
      return "static";
    case Scale::kPerToken:
      return "per_token";
    case Scale::kPerBlock:
      return "per_block";
  }
  return "unknown";
}

// Counted while encoding. A saturated value was above the format's largest finite value (infinities included);
// a NaN was stored as the format's NaN, or as 0 where the format has none.
struct EncodeCounts {
  int64_t values = 0;
  int64_t saturated = 0;
  int64_t nan = 0;

  EncodeCounts& operator+=(const EncodeCounts& other) {
    values += other.values;
    saturated += other.saturated;
    nan += other.nan;
    return *this;
  }
};

// Pointers to the planes of one token's row in one cell; a plane that the format lacks is ignored.
struct ConstRowPlanes {
  const uint8_t* codes;         // [head_dim * code_bits / 8]
  const uint8_t* block_scales;  // [head_dim / block], block_scale_bytes each, little endian
  const uint8_t* token_scales;  // [1], token_scale_bytes, little endian
};
struct RowPlanes {
  uint8_t* codes;
  uint8_t* block_scales;
  uint8_t* token_scales;

  operator ConstRowPlanes() const noexcept {  // NOLINT(google-explicit-constructor): pointers to const, nothing else
    return {codes, block_scales, token_scales};
  }
};

struct Format {
  std::string_view name;                      // canonical, e.g. "fp8_e4m3"
  std::span<const std::string_view> aliases;  // e.g. {"fp8"}
  std::string_view summary;                   // one line for --help and docs
  std::string_view rule;                      // how a row becomes codes and scales, for docs
  Code code;
  int code_bits;  // 32, 16, 8, 4
  Scale scale;
  int block;              // channels per block scale; 0 without
  int block_scale_bytes;  // one element of the plane block_scales; 0 without
  int token_scale_bytes;  // one element of the plane token_scales; 0 without
  bool hadamard;          // default transform of the preset name
  ExactPages exact;       // default of the preset name
  int sink_pages;         // default of the preset name

  // Encodes one token's row of one head, already transformed: x[head_dim] f32 -> planes. `static_scale` is used by
  // Scale::kStatic only (stored value = x / static_scale). Bit-exact on every backend; never throws.
  void (*encode_row)(const float* x, int head_dim, float static_scale, RowPlanes out, EncodeCounts& counts) noexcept;
  // The inverse: planes -> x[head_dim] f32 (still transformed).
  void (*decode_row)(ConstRowPlanes in, int head_dim, float static_scale, float* x) noexcept;
};

// All formats, in the order of all.h.
std::span<const Format> All() noexcept;

// By canonical name or alias; FindOrNull gives nullptr, Find throws InputError with the reason and the names.
const Format* FindOrNull(std::string_view name) noexcept;
const Format& Find(std::string_view name);

}  // namespace kvanta::formats
