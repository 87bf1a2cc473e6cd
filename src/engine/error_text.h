// Error texts of requests that end; without memory for the full text, a short one that allocates nothing.
#pragma once

#include <fmt/format.h>

#include <exception>
#include <new>
#include <string>
#include <utility>

namespace kvanta::engine {

inline constexpr const char* kOutOfMemory = "out of memory";  // fits in a std::string without allocation

template <class... Args>
std::string ErrorText(fmt::format_string<Args...> format, Args&&... args) noexcept {
  try {
    return fmt::format(format, std::forward<Args>(args)...);
  } catch (...) {
    return kOutOfMemory;
  }
}

inline std::string ErrorText(const std::exception& error) noexcept {
  const bool memory = dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
  return ErrorText("{}", memory ? kOutOfMemory : error.what());
}

}  // namespace kvanta::engine
