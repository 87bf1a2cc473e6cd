#include "base/memory_map.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <utility>
#include <vector>

namespace kvanta {
namespace {

constexpr size_t kOsPage = 4096;
constexpr size_t kBytes = 256 * kOsPage + 100;  // ends within a page

class MemoryMapTest : public testing::Test {
 protected:
  void SetUp() override {
    path_ = std::filesystem::temp_directory_path() / ("kvanta_memory_map_" + std::to_string(::getpid()));
    for (size_t i = 0; i < kBytes; ++i) contents_.push_back(static_cast<uint8_t>(i * 31 + i / 256));
    std::ofstream(path_, std::ios::binary).write(reinterpret_cast<const char*>(contents_.data()), kBytes);
    const int file = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    ::fsync(file);  // only clean pages can be evicted
    ::close(file);
  }
  void TearDown() override { std::filesystem::remove(path_); }

  bool IsInMemory() const {  // a file system without a page cache to evict from
    constexpr long kTmpfs = 0x01021994;
    struct statfs info {};
    return ::statfs(path_.c_str(), &info) == 0 && info.f_type == kTmpfs;
  }
  static size_t ResidentPages(const MemoryMap& map) {
    std::vector<unsigned char> resident((map.Bytes().size() + kOsPage - 1) / kOsPage);
    EXPECT_EQ(::mincore(const_cast<uint8_t*>(map.Bytes().data()), map.Bytes().size(), resident.data()), 0);
    return static_cast<size_t>(std::ranges::count_if(resident, [](unsigned char page) { return (page & 1) != 0; }));
  }

  std::filesystem::path path_;
  std::vector<uint8_t> contents_;
};

TEST_F(MemoryMapTest, EvictsPagesThatAreReadAgain) {
  const MemoryMap map(path_.string());
  ASSERT_TRUE(std::ranges::equal(map.Bytes(), contents_));
  EXPECT_EQ(ResidentPages(map), kBytes / kOsPage + 1);
  map.ReleasePages(map.Bytes());
  EXPECT_EQ(ResidentPages(map), kBytes / kOsPage + 1) << "the page cache keeps released pages";
  map.EvictPages(map.Bytes());
  if (!IsInMemory()) {
    EXPECT_LT(ResidentPages(map), kBytes / kOsPage / 2);
  }
  EXPECT_TRUE(std::ranges::equal(map.Bytes(), contents_));
}

TEST_F(MemoryMapTest, IgnoresBytesOutsideOfTheMap) {
  const MemoryMap map(path_.string());
  const std::vector<uint8_t> other(2 * kOsPage, 1);
  map.EvictPages(other);
  map.EvictPages({});
  EXPECT_EQ(other[kOsPage], 1);
  EXPECT_TRUE(std::ranges::equal(map.Bytes(), contents_));
}

TEST_F(MemoryMapTest, MovedMapKeepsTheFile) {
  MemoryMap first(path_.string());
  MemoryMap second(std::move(first));
  first = std::move(second);
  first.EvictPages(first.Bytes());
  EXPECT_TRUE(std::ranges::equal(first.Bytes(), contents_));
}

}  // namespace
}  // namespace kvanta
