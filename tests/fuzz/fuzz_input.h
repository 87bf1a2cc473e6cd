// Driver that every fuzz target runs its reader with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "kvanta/error.h"

namespace kvanta::fuzz {

// A refusal must be an InputError of one printable line; everything else is a finding.
template <class Read>
void MustReadOrRefuse(const Read& read) {
  try {
    read();
  } catch (const InputError& error) {
    for (const char* c = error.what(); *c != '\0'; ++c) {
      if (*c < 0x20 || *c > 0x7e) __builtin_trap();
    }
  }
}

inline std::string_view Text(std::span<const uint8_t> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace kvanta::fuzz
