// A folder of one test, removed at its end.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

namespace kvanta::weights {

class TempFolder {
 public:
  TempFolder() {
    static std::atomic<int> next{0};
    path_ = std::filesystem::path(::testing::TempDir()) /
            ("kvanta_" + std::to_string(::getpid()) + "_" + std::to_string(next++));
    std::filesystem::create_directories(path_);
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  std::string Path() const { return path_.string(); }
  std::string Write(const std::string& name, std::string_view bytes) const {
    std::ofstream file(path_ / name, std::ios::binary);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    return (path_ / name).string();
  }

 private:
  std::filesystem::path path_;
};

}  // namespace kvanta::weights
