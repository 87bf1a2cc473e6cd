// Foreign text in error messages: one printable line whatever the file said, and "did you mean" lists.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvanta {

// 'text' in quotes; control bytes and bytes above 126 as \xNN; shortened in the middle beyond `limit` bytes.
std::string Quote(std::string_view text, size_t limit = 120);

// The up to `count` candidates nearest to `name` by edit distance, nearest first, ties in the order given.
std::vector<std::string> Nearest(std::string_view name, std::span<const std::string> candidates, size_t count = 3);

}  // namespace kvanta
