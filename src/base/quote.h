// Untrusted text in error messages: one printable line of limited length, and "did you mean" lists.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvanta {

// `text` on one printable line: control bytes and bytes above 126 as \xNN; shortened in the middle beyond `limit`
// bytes.
std::string Sanitize(std::string_view text, size_t limit = 120);

// The same in single quotes.
std::string Quote(std::string_view text, size_t limit = 120);

// A size for people: "1.5 KiB"; plain bytes below 1024.
std::string FormatBytes(int64_t bytes);

// Levenshtein distance: insertions, deletions, substitutions.
size_t EditDistance(std::string_view a, std::string_view b);

// The up to `count` candidates nearest to `name` by edit distance, nearest first, ties in the order given.
std::vector<std::string> Nearest(std::string_view name, std::span<const std::string> candidates, size_t count = 3);

}  // namespace kvanta
