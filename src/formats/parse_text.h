// Splitting of short texts that users type.
#pragma once

#include <string_view>

namespace kvanta::formats {

// `text` without blanks at either end.
inline std::string_view Trim(std::string_view text) noexcept {
  constexpr std::string_view kBlank = " \t\r\n";
  const size_t begin = text.find_first_not_of(kBlank);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlank) - begin + 1);
}

// Removes the text up to `separator` (or all of it), and the separator, from the front; returns it without the latter.
inline std::string_view TakeUntil(std::string_view& text, char separator) noexcept {
  const size_t end = text.find(separator);
  const std::string_view head = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  return head;
}

}  // namespace kvanta::formats
