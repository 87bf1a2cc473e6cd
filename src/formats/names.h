// Names that users type for a cache: those of All(), and those of other engines, which are translated or refused with
// the reason.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>

namespace kvanta::formats {

struct Format;

// A name of another engine. Exactly one of `format` and `reason` is set.
struct CompatName {
  std::string_view name;
  std::string_view origin;  // the engine
  std::string_view format;  // the format that it stands for, or a scheme k=...,v=...
  std::string_view reason;  // why it is refused
};

// In documentation order.
std::span<const CompatName> CompatNames() noexcept;
const CompatName* FindCompatName(std::string_view name) noexcept;

// "fp32, bf16, ...": the formats for which `fits` is true.
std::string NamesOf(const std::function<bool(const Format&)>& fits);

// "auto, fp32, bf16, ...": what an error offers.
std::string AvailableNames();

// Refuses `name` with the reason, a near name if there is one, and what is available.
[[noreturn]] void ThrowUnknownName(std::string_view name);

}  // namespace kvanta::formats
