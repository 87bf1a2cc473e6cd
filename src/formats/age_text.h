// The text of precision by age, "0=int8,8192=int4,32768=t3", and by pressure, "0=int8,floor=t3".
#pragma once

#include <string>
#include <string_view>

#include "kvanta/kv_scheme.h"

namespace kvanta::formats {

// True for a text that begins with a number of tokens, or "floor", and '='.
bool IsAgeText(std::string_view text) noexcept;

// Throws InputError.
KvScheme ParseAges(std::string_view text, bool mla);

// The scheme of a later level, without its age.
std::string LevelText(const KvAge& age);

// The inverse of ParseAges, of a scheme with ages.
std::string AgeText(const KvScheme& scheme);

}  // namespace kvanta::formats
