// Taking apart short texts that a user typed, and showing them in one-line messages.
#pragma once

#include <string>
#include <string_view>

namespace kvanta::formats {

// Without blanks at either end.
inline std::string_view Trim(std::string_view text) noexcept {
  constexpr std::string_view kBlank = " \t\r\n";
  const size_t begin = text.find_first_not_of(kBlank);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlank) - begin + 1);
}

// The text up to `separator` (or all of it), which is taken off the front together with the separator.
inline std::string_view TakeUntil(std::string_view& text, char separator) noexcept {
  const size_t end = text.find(separator);
  const std::string_view head = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  return head;
}

// For an error message: cut at 80 characters, and anything unprintable as '?', so that the message stays one line.
inline std::string Sanitize(std::string_view text) {
  constexpr size_t kLongest = 80;
  std::string shown;
  for (const char c : text.substr(0, kLongest)) shown += c >= ' ' && c <= '~' ? c : '?';
  if (text.size() > kLongest) shown += "...";
  return shown;
}

}  // namespace kvanta::formats
