#include "base/cgroup.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

namespace kvanta {
namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// Files of a cgroup hierarchy in a folder of the test's own.
class CgroupTest : public testing::Test {
 protected:
  void SetUp() override {
    root_ = testing::TempDir() + "/cgroup_test_" + testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::remove_all(root_);
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = root_ + "/" + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text << "\n";
  }
  int64_t Available(const std::string& membership) const {
    Write("membership", membership);
    return CgroupAvailable(root_ + "/membership", root_);
  }
  int64_t Cpus(const std::string& membership) const {
    Write("membership", membership);
    return CgroupCpus(root_ + "/membership", root_);
  }

 private:
  std::string root_;
};

TEST_F(CgroupTest, PageCacheCountsAsAvailable) {
  Write("memory.max", "1000");
  Write("memory.current", "900");
  Write("memory.stat", "anon 100\nfile 800\ninactive_anon 1\ninactive_file 700\nactive_file 100");
  EXPECT_EQ(Available("0::/"), 800);
}

TEST_F(CgroupTest, PageCacheOfVersionOne) {
  Write("memory/box/memory.limit_in_bytes", "1000");
  Write("memory/box/memory.usage_in_bytes", "900");
  Write("memory/box/memory.stat", "cache 800\ninactive_file 1\ntotal_inactive_file 650\ntotal_active_file 150");
  EXPECT_EQ(Available("3:cpu,cpuacct:/other\n2:hugetlb,memory:/box\n0::/"), 750);
}

TEST_F(CgroupTest, LeastOfGroupAndAncestors) {
  Write("a/memory.max", "1000");
  Write("a/memory.current", "950");
  Write("a/memory.stat", "inactive_file 30");
  Write("a/b/memory.max", "500");
  Write("a/b/memory.current", "200");
  EXPECT_EQ(Available("0::/a/b"), 80);
}

TEST_F(CgroupTest, NeverNegativeNorMoreThanTheLimit) {
  Write("memory.max", "1000");
  Write("memory.current", "1200");
  EXPECT_EQ(Available("0::/"), 0);
  Write("memory.stat", "inactive_file 5000");  // files are not read at one instant
  EXPECT_EQ(Available("0::/"), 1000);
}

TEST_F(CgroupTest, NoLimit) {
  EXPECT_EQ(Available("0::/a"), kUnlimited);
  Write("memory.max", "max");
  Write("memory.current", "900");
  EXPECT_EQ(Available("0::/a"), kUnlimited);
}

TEST_F(CgroupTest, CpusOfVersionTwoAreTheLeastOfGroupAndAncestors) {
  Write("pod/cpu.max", "400000 100000");
  Write("pod/box/cpu.max", "250000 100000");
  EXPECT_EQ(Cpus("0::/pod/box"), 2);
  Write("pod/cpu.max", "50000 100000");
  EXPECT_EQ(Cpus("0::/pod/box"), 1);
  Write("pod/cpu.max", "max 100000");
  Write("pod/box/cpu.max", "max 100000");
  EXPECT_EQ(Cpus("0::/pod/box"), kUnlimited);
}

TEST_F(CgroupTest, CpusOfVersionOne) {
  Write("cpu/box/cpu.cfs_quota_us", "600000");
  Write("cpu/box/cpu.cfs_period_us", "100000");
  Write("cpu/cpu.cfs_quota_us", "-1");
  Write("cpu/cpu.cfs_period_us", "100000");
  const std::string membership = "4:memory:/other\n3:cpu,cpuacct:/box\n0::/";
  EXPECT_EQ(Cpus(membership), 6);
  Write("cpu/box/cpu.cfs_quota_us", "-1");
  EXPECT_EQ(Cpus(membership), kUnlimited);
}

TEST_F(CgroupTest, CpusWithoutOrWithMalformedFiles) {
  EXPECT_EQ(Cpus("0::/a"), kUnlimited);
  Write("a/cpu.max", "100000");
  EXPECT_EQ(Cpus("0::/a"), kUnlimited);
  Write("a/cpu.max", "100000 0");
  EXPECT_EQ(Cpus("0::/a\nnonsense"), kUnlimited);
}

}  // namespace
}  // namespace kvanta
