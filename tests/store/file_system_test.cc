// Files of stored pages: a write that fails, however late, leaves no file.
#include "store/file_system.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "weights/temp_folder.h"

namespace {
thread_local int close_error = 0;  // error of this thread's next close
}

// In place of the C library's.
extern "C" int close(int fd) {
  const long result = syscall(SYS_close, fd);
  if (close_error == 0) return static_cast<int>(result);
  errno = std::exchange(close_error, 0);
  return -1;
}

namespace kvanta::store {
namespace {

TEST(FileSystem, AWriteThatFailsAtItsEndLeavesNoFile) {
  const weights::TempFolder folder;
  const std::string path = folder.Path() + "/record";
  const std::vector<uint8_t> bytes(100, 7);
  const std::span<const uint8_t> part = bytes;
  close_error = EDQUOT;
  EXPECT_EQ(WriteFile(path, {&part, 1}, 0), EDQUOT);
  EXPECT_TRUE(std::filesystem::is_empty(folder.Path()));
  EXPECT_EQ(WriteFile(path, {&part, 1}, 0), 0);
  std::vector<uint8_t> read;
  EXPECT_EQ(ReadFile(path, 1000, read), 0);
  EXPECT_EQ(read, bytes);
}

}  // namespace
}  // namespace kvanta::store
