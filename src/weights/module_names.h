// Names of tensors and modules.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace kvanta::weights {

inline constexpr std::string_view kExpressionPrefix = "re:";  // prefix of a regular expression in a list of names

// Regular expressions of module names in quantization configurations. std::regex recurses and backtracks: with it, an
// expression of a downloaded file could take any time and stack.
//
// True if `expression` matches a beginning of `name`, as Python's re.match does. Takes literals, ., [...], \d, \w, \s,
// escaped punctuation, ^, $, groups, |, the quantifiers *, + and ?, also lazy, and lookahead that is not nested. Throws
// InputError for other syntax, whatever the name is, and for an expression that takes too long.
bool MatchesExpression(std::string_view expression, std::string_view name);

// The index after "layers." in the name of a tensor or module of a layer; nullopt without one.
std::optional<int64_t> LayerOf(std::string_view name);

}  // namespace kvanta::weights
