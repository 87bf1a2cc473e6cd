#include "base/quote.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace kvanta {
namespace {

void AppendPrintable(std::string& out, std::string_view text) {
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte > 0x7e) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
}

}  // namespace

std::string Sanitize(std::string_view text, size_t limit) {
  std::string out;
  if (text.size() <= limit) {
    AppendPrintable(out, text);
  } else {
    AppendPrintable(out, text.substr(0, limit / 2));
    out += fmt::format("...({} bytes)...", text.size());
    AppendPrintable(out, text.substr(text.size() - limit / 4));
  }
  return out;
}

std::string Quote(std::string_view text, size_t limit) {
  return fmt::format("'{}'", Sanitize(text, limit));
}

std::string FormatBytes(int64_t bytes) {
  if (bytes < 1024) return fmt::format("{} B", bytes);
  auto size = static_cast<double>(bytes) / 1024;
  const char* unit = "KiB";
  for (const char* next : {"MiB", "GiB", "TiB"}) {
    if (size < 1024) break;
    size /= 1024;
    unit = next;
  }
  return fmt::format("{:.1f} {}", size, unit);
}

size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = std::exchange(row[j], std::min({replaced, row[j] + 1, row[j - 1] + 1}));
    }
  }
  return row.back();
}

std::vector<std::string> Nearest(std::string_view name, std::span<const std::string> candidates, size_t count) {
  constexpr size_t kLongest =
      200;  // longer names are not typing errors, and the cost grows with the product of lengths
  if (name.size() > kLongest) return {};
  std::vector<std::pair<size_t, size_t>> order;  // distance, index
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (candidates[i].size() <= kLongest) order.emplace_back(EditDistance(name, candidates[i]), i);
  }
  std::sort(order.begin(), order.end());
  std::vector<std::string> nearest;
  for (size_t i = 0; i < std::min(count, order.size()); ++i) nearest.push_back(candidates[order[i].second]);
  return nearest;
}

}  // namespace kvanta
