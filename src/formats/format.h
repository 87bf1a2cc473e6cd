// Run-time view of a number format, which all other layers use. Each format is a type in its own file
// (src/formats/<name>.h) and one line in all.h; this view is derived from the type by MakeFormat<T>() there.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "base/host_device.h"
#include "formats/element_type.h"
#include "formats/scale_type.h"
#include "kvanta/kv_scheme.h"

namespace kvanta::formats {

// Counted while encoding. A saturated value was above the format's largest finite value (infinities included);
// a NaN was stored as the format's NaN, or as 0 where the format has none.
struct EncodeCounts {
  int64_t values = 0;
  int64_t saturated = 0;
  int64_t nan = 0;

  KVANTA_HD EncodeCounts& operator+=(const EncodeCounts& other) {
    values += other.values;
    saturated += other.saturated;
    nan += other.nan;
    return *this;
  }
};

// Pointers to the sections of one token's row in one cell; those that the format lacks are ignored. All little endian.
struct ConstRowSections {
  const uint8_t* codes = nullptr;          // [head_dim * code_bits / 8]
  const uint8_t* block_scales = nullptr;   // [head_dim / channels]
  const uint8_t* block_offsets = nullptr;  // [head_dim / channels], fp16
  const uint8_t* token_scales = nullptr;   // [1]
  const uint8_t* token_offsets = nullptr;  // [1], fp16
};
struct RowSections {
  uint8_t* codes = nullptr;
  uint8_t* block_scales = nullptr;
  uint8_t* block_offsets = nullptr;
  uint8_t* token_scales = nullptr;
  uint8_t* token_offsets = nullptr;

  // NOLINTNEXTLINE(google-explicit-constructor): pointers to const, nothing else
  KVANTA_HD operator ConstRowSections() const noexcept {
    return {codes, block_scales, block_offsets, token_scales, token_offsets};
  }
};

// Sections of a token group: consecutive rows of codes, and the scales that they share.
struct ConstGroupSections {
  const uint8_t* codes = nullptr;            // [tokens][head_dim * code_bits / 8]
  const uint8_t* token_scales = nullptr;     // [tokens]
  const uint8_t* channel_scales = nullptr;   // [head_dim], fp16; or as klt_group.h has them
  const uint8_t* channel_offsets = nullptr;  // [head_dim], fp16
};
struct GroupSections {
  uint8_t* codes = nullptr;
  uint8_t* token_scales = nullptr;
  uint8_t* channel_scales = nullptr;
  uint8_t* channel_offsets = nullptr;

  // NOLINTNEXTLINE(google-explicit-constructor): pointers to const, nothing else
  operator ConstGroupSections() const noexcept { return {codes, token_scales, channel_scales, channel_offsets}; }
};

struct BitAllocation;

// Static parameters of a KV head, which some formats use.
struct HeadParameters {
  float static_scale = 1;                     // where scaling.per_head: stored value = x / static_scale
  const BitAllocation* allocation = nullptr;  // where IsAllocated(code); null: DefaultAllocation()
  int unused_channels = 0;                    // a row's last channels, which are zeros that no scale depends on

  // NOLINTNEXTLINE(google-explicit-constructor): of most formats, the scale is all
  KVANTA_HD constexpr HeadParameters(float scale, const BitAllocation* bits = nullptr, int unused = 0) noexcept
      : static_scale(scale), allocation(bits), unused_channels(unused) {}
};

// Support for the latents of MLA: K and V in one cell, followed by the rotated channels of K in bf16.
enum class MlaSupport : uint8_t { kNo, kYes, kRequired };

struct Format {
  std::string_view name;                      // canonical, e.g. "fp8_e4m3"
  std::span<const std::string_view> aliases;  // e.g. {"fp8"}
  std::string_view summary;                   // one line for --help and docs
  std::string_view rule;                      // how a row becomes codes and scales, for docs
  ElementType code;
  int code_bits;  // 32, 16, 8, 6, 5, 4, 3, 2
  Scaling scaling;
  bool hadamard;        // default transform of the preset name
  ExactPages exact;     // default of the preset name
  int sink_pages;       // default of the preset name
  int boundary_layers;  // first and last layers that the preset name keeps in bf16
  MlaSupport latents;
  std::string_view latent_format;  // format that the name stands for in layers with MLA; empty: none but itself

  // Encodes one token's row of one head, already transformed: x[head_dim] f32 -> sections. Bit-exact on every backend;
  // never throws.
  void (*encode_row)(const float* x, int head_dim, HeadParameters head, RowSections out, EncodeCounts& counts) noexcept;
  // The inverse: sections -> x[head_dim] f32 (still transformed).
  void (*decode_row)(ConstRowSections in, int head_dim, HeadParameters head, float* x) noexcept;

  // Replace the two where scaling.token_group != 0: x f32 [token_group][head_dim].
  void (*encode_token_group)(const float* x, int head_dim, HeadParameters head, GroupSections out,
                             EncodeCounts& counts) noexcept;
  void (*decode_token_group)(ConstGroupSections in, int head_dim, float* x) noexcept;

  // Format of V where the name means a different one there; null: the same as on K.
  const Format* value_side;
};

// Format of a side, given the one that was found by name.
inline const Format& OnSide(const Format& format, bool is_key) noexcept {
  return is_key || format.value_side == nullptr ? format : *format.value_side;
}

// All formats, in the order of all.h.
std::span<const Format> All() noexcept;

// By canonical name or alias; FindOrNull gives nullptr, Find throws InputError with the reason and the names.
const Format* FindOrNull(std::string_view name) noexcept;
const Format& Find(std::string_view name);

}  // namespace kvanta::formats
