#include "formats/format.h"

#include <array>

#include "formats/all.h"
#include "formats/names.h"

namespace kvanta::formats {
namespace {

template <class... T>
constexpr std::array<Format, sizeof...(T)> MakeFormats(TypeList<T...> /*list*/) noexcept {
  return {MakeFormat<T>()...};
}

constexpr auto kFormats = MakeFormats(FormatList{});

}  // namespace

std::span<const Format> All() noexcept {
  return kFormats;
}

const Format* FindOrNull(std::string_view name) noexcept {
  for (const Format& format : kFormats) {
    if (format.name == name) return &format;
    for (const std::string_view alias : format.aliases) {
      if (alias == name) return &format;
    }
  }
  return nullptr;
}

const Format& Find(std::string_view name) {
  if (const Format* format = FindOrNull(name)) return *format;
  ThrowUnknownName(name);
}

}  // namespace kvanta::formats
