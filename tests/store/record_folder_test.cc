// The folder of stored records: times of use by clocks that jump, and many files.
#include "store/record_folder.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/clock.h"
#include "kvanta/cache_folder.h"
#include "weights/temp_folder.h"

namespace kvanta::store {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kDayNs = int64_t{86400} * 1'000'000'000;
constexpr int64_t kFileBytes = 4096;  // bytes that a small record takes

class RecordFolderTest : public testing::Test {
 protected:
  RecordFolder Open(int64_t limit_bytes = 1 << 30) {
    return RecordFolder(
        {.folder = folder_.Path(), .limit_bytes = limit_bytes, .identity = "{}", .max_file_bytes = 1024});
  }
  static RecordId Id(int number) { return {ChildKey(IdentityKey("{}"), std::vector<int32_t>{number}), 0}; }
  std::string PathOf(int number) const {
    const std::string name = FileName(Id(number));
    return folder_.Path() + "/" + Hex(IdentityKey("{}")).substr(0, 32) + "/" + name.substr(0, 2) + "/" + name;
  }
  // Page `index` of a prefix, after the page of the number before.
  std::string TryWrite(RecordFolder& folder, int number, int64_t index = 0) const {
    const std::vector<uint8_t> payload(100);
    const std::vector<uint8_t> header =
        EncodePageHeader(IdentityKey("{}"), Id(number), std::vector<int32_t>{number}, payload);
    const auto content = std::make_shared<const RecordContent>(RecordContent{
        .parent = index > 0 ? Id(number - 1).key : PageKey{}, .tokens = {number}, .payload = OwnBytes(payload)});
    const RecordToWrite record{.use = {.id = Id(number), .index = index}, .header = header, .content = content};
    return folder.Write({&record, 1}).error;
  }
  void Write(RecordFolder& folder, int number, int64_t index = 0) const {
    ASSERT_EQ(TryWrite(folder, number, index), "");
  }
  ReadResult::Outcome Read(RecordFolder& folder, int number) const {
    const RecordId id = Id(number);
    return folder.Read({&id, 1})[0].outcome;
  }
  static void Pin(RecordFolder& folder, int number, int64_t until_ns) {
    const RecordUse use{.id = Id(number)};
    folder.Pin({&use, 1}, {&until_ns, 1});
  }
  static CacheTierStats Stats(const RecordFolder& folder) {
    CacheTierStats stats;
    folder.Describe(stats);
    return stats;
  }
  static int64_t ModifiedNs(const std::string& path) {
    std::vector<FileEntry> files;
    EXPECT_EQ(ListFiles(fs::path(path).parent_path(), 0, files), 0);
    for (const FileEntry& file : files) {
      if (file.path == fs::path(path).filename()) return file.modified_ns;
    }
    return -1;
  }

  weights::TempFolder folder_;
};

// A file that was used "in ten years" would otherwise stay for ten years, whatever is used since.
TEST_F(RecordFolderTest, TimesInTheFutureAgeFromNowOn) {
  {
    RecordFolder folder = Open();
    for (int i = 0; i < 4; ++i) Write(folder, i);
  }
  const int64_t now = WallClockNs();
  const timespec year_2400 = {.tv_sec = 13'569'465'600, .tv_nsec = 0};  // more nanoseconds than 64 bits count
  const timespec times[2] = {year_2400, year_2400};
  ASSERT_EQ(::utimensat(AT_FDCWD, PathOf(3).c_str(), times, 0), 0);
  ASSERT_EQ(SetModified(PathOf(0), now + 3650 * kDayNs), 0);
  ASSERT_EQ(SetModified(PathOf(1), now + 3651 * kDayNs), 0);
  RecordFolder folder = Open(32 * kFileBytes);
  folder.Open();
  EXPECT_LE(ModifiedNs(PathOf(0)), WallClockNs());
  EXPECT_LT(ModifiedNs(PathOf(0)), ModifiedNs(PathOf(1))) << "their order stays";
  for (const int file : {0, 3}) EXPECT_GT(ModifiedNs(PathOf(file)), now - kDayNs) << file;
  EXPECT_EQ(Read(folder, 0), ReadResult::Outcome::kRead);
  for (int i = 100; i < 132; ++i) Write(folder, i);
  EXPECT_EQ(Read(folder, 0), ReadResult::Outcome::kMissing) << "evicted before files that were written since";
  EXPECT_EQ(Read(folder, 131), ReadResult::Outcome::kRead);
  EXPECT_LE(Stats(folder).bytes, 32 * kFileBytes);
}

TEST_F(RecordFolderTest, TimesInThePastGoFirstAndAreReadUntilThen) {
  RecordFolder folder = Open(16 * kFileBytes);
  for (int i = 0; i < 8; ++i) Write(folder, i);
  ASSERT_EQ(SetModified(PathOf(7), 0), 0);  // 1970
  folder.Open();
  EXPECT_EQ(Read(folder, 7), ReadResult::Outcome::kRead);
  for (int i = 100; i < 109; ++i) Write(folder, i);
  EXPECT_EQ(Read(folder, 7), ReadResult::Outcome::kMissing);
  EXPECT_EQ(Read(folder, 6), ReadResult::Outcome::kRead);
  EXPECT_TRUE(folder.NeedsTouch(Id(6)) || ModifiedNs(PathOf(6)) > WallClockNs() - kDayNs);
}

TEST_F(RecordFolderTest, TemporaryFilesOfAnyOtherTimeAreRemoved) {
  RecordFolder folder = Open();
  Write(folder, 1);
  const std::string below = fs::path(PathOf(1)).parent_path();
  for (const char* name : {"/.tmp-past", "/.tmp-future", "/.tmp-now"}) std::ofstream(below + name) << "x";
  ASSERT_EQ(SetModified(below + "/.tmp-past", 0), 0);
  ASSERT_EQ(SetModified(below + "/.tmp-future", WallClockNs() + kDayNs), 0);
  folder.Open();
  EXPECT_FALSE(fs::exists(below + "/.tmp-past"));
  EXPECT_FALSE(fs::exists(below + "/.tmp-future"));
  EXPECT_TRUE(fs::exists(below + "/.tmp-now")) << "another process writes it";
}

TEST_F(RecordFolderTest, PinnedFilesStayWithinHalfOfTheLimit) {
  RecordFolder folder = Open(16 * kFileBytes);
  const int64_t now = WallClockNs();
  constexpr int64_t kMinuteNs = int64_t{60} * 1'000'000'000;
  for (int i = 0; i < 12; ++i) {
    Write(folder, i);
    Pin(folder, i, now + (i + 1) * kMinuteNs);
  }
  const RecordUse used{.id = Id(11)};
  folder.Touch({&used, 1});
  EXPECT_EQ(ModifiedNs(PathOf(11)), now + 12 * kMinuteNs) << "a use does not end a pin";
  for (int i = 100; i < 120; ++i) Write(folder, i);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(Read(folder, i), ReadResult::Outcome::kMissing) << i;
  for (int i = 4; i < 12; ++i) EXPECT_EQ(Read(folder, i), ReadResult::Outcome::kRead) << i;
  EXPECT_EQ(Read(folder, 119), ReadResult::Outcome::kRead);
  RecordFolder other = Open(16 * kFileBytes);
  other.Open();
  for (int i = 200; i < 220; ++i) Write(other, i);
  EXPECT_EQ(Read(other, 4), ReadResult::Outcome::kRead) << "after a restart";
  Pin(folder, 4, now + 365 * kDayNs);
  EXPECT_LE(ModifiedNs(PathOf(4)), WallClockNs() + kDayNs);
}

// Pages of one prefix are written and used one after the other, but those after a page are useless without it.
TEST_F(RecordFolderTest, NoPageIsEvictedBeforeThoseBehindIt) {
  RecordFolder folder = Open(16 * kFileBytes);
  const auto expect_order = [&] {
    for (int page = 1; page < 8; ++page) EXPECT_LT(ModifiedNs(PathOf(page)), ModifiedNs(PathOf(page - 1))) << page;
  };
  for (int page = 0; page < 8; ++page) {
    Write(folder, page, page);
    ::usleep(3000);  // stands for computing
  }
  expect_order();
  for (int page = 0; page < 8; ++page) ASSERT_EQ(SetModified(PathOf(page), WallClockNs() - kDayNs), 0);
  folder.Open();
  for (int page = 0; page < 8; ++page) {
    const RecordUse use{.id = Id(page), .index = page};
    folder.Touch({&use, 1});
  }
  expect_order();
  for (int i = 100; i < 110; ++i) Write(folder, i);
  int kept = 0;
  while (kept < 8 && Read(folder, kept) == ReadResult::Outcome::kRead) ++kept;
  EXPECT_GT(kept, 0);
  EXPECT_LT(kept, 8);
  for (int page = kept; page < 8; ++page) EXPECT_EQ(Read(folder, page), ReadResult::Outcome::kMissing) << page;
}

// Descriptions of other models' pages, which stay.
TEST_F(RecordFolderTest, NothingIsWrittenBeyondTheLimitWhereOthersCannotGo) {
  for (int i = 0; i < 4; ++i) {
    const std::string other = folder_.Path() + "/" + Hex(IdentityKey(std::to_string(i))).substr(0, 32);
    fs::create_directories(other);
    std::ofstream(other + "/identity.json") << "{}";
  }
  RecordFolder folder = Open(4 * kFileBytes);
  folder.Open();
  for (const int number : {1, 2}) {
    EXPECT_EQ(TryWrite(folder, number),
              "4096 bytes do not fit in addition to 16384 that cannot be removed, with a limit of 16384");
  }
  EXPECT_LE(Stats(folder).bytes, 4 * kFileBytes);
}

// A process that only reads what others write tells of its uses, and copies nothing that is there.
TEST_F(RecordFolderTest, FilesOfOtherProcessesAreKnownOnceSeen) {
  RecordFolder folder = Open();
  folder.Open();
  RecordFolder other = Open();
  for (const int file : {1, 2}) Write(other, file);
  const int64_t hour_ago = WallClockNs() - kDayNs / 24;
  ASSERT_EQ(SetModified(PathOf(1), hour_ago), 0);
  EXPECT_FALSE(folder.IsKnown(Id(1)));
  EXPECT_EQ(Read(folder, 1), ReadResult::Outcome::kRead);
  EXPECT_TRUE(folder.IsKnown(Id(1)));
  EXPECT_TRUE(folder.NeedsTouch(Id(1)));
  const RecordUse used{.id = Id(1)};
  folder.Touch({&used, 1});
  EXPECT_GT(ModifiedNs(PathOf(1)), hour_ago + kDayNs / 48);
  Write(folder, 2);
  EXPECT_TRUE(folder.IsKnown(Id(2)));
  EXPECT_EQ(Stats(folder).files, 2);
  EXPECT_EQ(Stats(folder).bytes, 2 * kFileBytes);
}

TEST_F(RecordFolderTest, ALinkInPlaceOfAFileIsDamaged) {
  RecordFolder folder = Open();
  Write(folder, 1);
  fs::remove(PathOf(1));
  fs::create_symlink("/dev/zero", PathOf(1));
  EXPECT_EQ(Read(folder, 1), ReadResult::Outcome::kDamaged) << "removed, while a read that fails is tried for ever";
}

TEST_F(RecordFolderTest, AFolderThatCannotBeSearchedIsTold) {
  RecordFolder folder = Open();
  const std::vector<RecordId> ids = {Id(1)};
  std::vector<uint8_t> found(1, 0);
  EXPECT_EQ(folder.Find(ids, found), "");
  fs::remove_all(folder_.Path());
  EXPECT_EQ(folder.Find(ids, found), "") << "it is made again with the next write";
  fs::create_symlink(folder_.Path(), folder_.Path());  // a loop
  EXPECT_NE(folder.Find(ids, found), "");
  EXPECT_EQ(found[0], 0);
}

// A process goes on after its folder has been cleared: what it writes then has a description again.
TEST_F(RecordFolderTest, ClearedFoldersAreDescribedAgain) {
  RecordFolder folder = Open();
  for (const int file : {1, 2}) Write(folder, file);
  const RecordId evicted = Id(1);
  folder.Remove({&evicted, 1});  // leaves the folder of its digits
  EXPECT_EQ(ClearCacheFolder(folder_.Path()), 2) << "a record and the description";
  EXPECT_TRUE(fs::is_empty(folder_.Path()));
  Write(folder, 1);
  EXPECT_EQ(ListCacheFolder(folder_.Path())[0].identity, "{}");
  fs::remove(fs::path(PathOf(1)).parent_path().parent_path() / "identity.json");
  folder.Open();
  const std::vector<CacheFolderEntry> entries = VerifyCacheFolder(folder_.Path());
  ASSERT_EQ(entries.size(), 1u);
  EXPECT_EQ(entries[0].identity, "{}");
  EXPECT_TRUE(entries[0].damaged.empty());
}

TEST_F(RecordFolderTest, OthersWhoCanWriteAreNamed) {
  ASSERT_EQ(::chmod(folder_.Path().c_str(), 0755), 0);
  EXPECT_EQ(WarnOfOtherWriters(folder_.Path()), "");
  EXPECT_EQ(WarnOfOtherWriters(folder_.Path() + "/none"), "");
  for (const auto& [mode, text] : {std::pair(mode_t{0770}, "(mode 0770)"), std::pair(mode_t{01777}, "(mode 1777)")}) {
    ASSERT_EQ(::chmod(folder_.Path().c_str(), mode), 0);
    EXPECT_NE(WarnOfOtherWriters(folder_.Path()).find(text), std::string::npos);
  }
  if (::geteuid() != 0) return;  // only root can give a folder away
  ASSERT_EQ(::chmod(folder_.Path().c_str(), 0700), 0);
  ASSERT_EQ(::chown(folder_.Path().c_str(), 12345, 12345), 0);
  EXPECT_NE(WarnOfOtherWriters(folder_.Path()).find("belongs to user 12345, not to 0, who may"), std::string::npos);
}

int64_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  int64_t total = 0;
  int64_t resident = 0;
  file >> total >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

TEST_F(RecordFolderTest, ManyFilesAreCountedInSecondsAndBoundedMemory) {
#ifdef KVANTA_SANITIZED
  constexpr int kFiles = 2000;
#else
  constexpr int kFiles = 20'000;
#endif
  const std::string root = folder_.Path() + "/" + Hex(IdentityKey("{}")).substr(0, 32) + "/";
  for (int i = 0; i < 256; ++i) fs::create_directories(root + Hex({{static_cast<uint8_t>(i)}}));
  for (int i = 0; i < kFiles; ++i) {
    const int fd = ::open(PathOf(i).c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    ASSERT_GE(fd, 0);
    ASSERT_EQ(::ftruncate(fd, 200), 0);
    ::close(fd);
  }
  const int64_t before = ResidentBytes();
  const double start = Now();
  RecordFolder folder = Open(kFileBytes * kFiles / 2);
  folder.Open();  // and evicts
  EXPECT_LT(Now() - start, 10);
  EXPECT_LE(Stats(folder).files, kFiles / 2);
  EXPECT_GE(Stats(folder).files, kFiles / 4);
#ifndef KVANTA_SANITIZED
  EXPECT_LT(ResidentBytes() - before, int64_t{600} * kFiles);
#else
  (void)before;
#endif
  const double steps = Now();
  for (int i = 0; i < 1000; ++i) folder.IsKnown(Id(i));
  EXPECT_LT(Now() - steps, 0.5) << "a step's question";
}

}  // namespace
}  // namespace kvanta::store
