#include "base/cgroup.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <string_view>

namespace kvanta {
namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// File names of one cgroup version, and memory.stat's key for inactive page cache, which the kernel reclaims first.
struct Hierarchy {
  std::string mount;
  const char* limit;
  const char* usage;
  std::string_view inactive_file;
};

// First number of a file; `missing` if there is none ("max" in cgroup files).
int64_t ReadNumber(const std::string& path, int64_t missing) {
  std::ifstream file(path);
  int64_t value = 0;
  return file >> value ? value : missing;
}

// Value of `key` in memory.stat, whose lines are "KEY BYTES"; 0 if absent.
int64_t ReadStat(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  std::string name;
  int64_t value = 0;
  while (file >> name >> value) {
    if (name == key) return value;
  }
  return 0;
}

// Calls visit(folder + "/") for `group` and its ancestors. A container sees its own group at the mount's root.
template <class Visit>
void ForAncestors(const std::string& mount, std::string group, Visit visit) {
  for (;;) {
    visit(mount + (group == "/" ? std::string() : group) + "/");
    if (group.empty() || group == "/") return;
    group.resize(group.find_last_of('/'));
  }
}

// Minimum over `group` and its ancestors of limit minus usage.
int64_t Available(const Hierarchy& hierarchy, const std::string& group) {
  int64_t available = kUnlimited;
  ForAncestors(hierarchy.mount, group, [&](const std::string& folder) {
    const int64_t limit = ReadNumber(folder + hierarchy.limit, kUnlimited);
    if (limit == kUnlimited) return;
    // Usage includes page cache (gigabytes after reading a checkpoint), whose inactive pages are reclaimable.
    const int64_t cached = ReadStat(folder + "memory.stat", hierarchy.inactive_file);
    const int64_t used = std::max<int64_t>(0, ReadNumber(folder + hierarchy.usage, 0) - cached);
    available = std::min(available, std::max<int64_t>(0, limit - used));
  });
  return available;
}

// Whole CPUs of a quota per period, at least one; `kUnlimited` without a quota.
int64_t CpusOf(int64_t quota, int64_t period) {
  if (quota <= 0 || quota == kUnlimited || period <= 0) return kUnlimited;
  return std::max<int64_t>(1, quota / period);
}

// True if the comma-separated `list` contains `name`.
bool Contains(std::string_view list, std::string_view name) {
  while (!list.empty()) {
    const size_t end = std::min(list.find(','), list.size());
    if (list.substr(0, end) == name) return true;
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return false;
}

// Calls visit(version, group) for each hierarchy that may limit `controller`. A line of `membership` is
// "ID:CONTROLLERS:GROUP"; version 2: "0::GROUP".
template <class Visit>
void ForHierarchies(const std::string& membership, std::string_view controller, Visit visit) {
  std::ifstream file(membership);
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string_view controllers = std::string_view(line).substr(first + 1, second - first - 1);
    if (controllers.empty() || Contains(controllers, controller)) {
      visit(controllers.empty() ? 2 : 1, line.substr(second + 1));
    }
  }
}

}  // namespace

int64_t CgroupAvailable(const std::string& membership, const std::string& mount) {
  int64_t available = kUnlimited;
  ForHierarchies(membership, "memory", [&](int version, const std::string& group) {
    const Hierarchy hierarchy = version == 2 ? Hierarchy{mount, "memory.max", "memory.current", "inactive_file"}
                                             : Hierarchy{mount + "/memory", "memory.limit_in_bytes",
                                                         "memory.usage_in_bytes", "total_inactive_file"};
    available = std::min(available, Available(hierarchy, group));
  });
  return available;
}

int64_t CgroupCpus(const std::string& membership, const std::string& mount) {
  int64_t cpus = kUnlimited;
  ForHierarchies(membership, "cpu", [&](int version, const std::string& group) {
    ForAncestors(version == 2 ? mount : mount + "/cpu", group, [&](const std::string& folder) {
      int64_t quota = kUnlimited, period = 0;
      if (version == 2) {
        std::ifstream file(folder + "cpu.max");  // "QUOTA PERIOD", or "max PERIOD"
        if (!(file >> quota >> period)) return;
      } else {
        quota = ReadNumber(folder + "cpu.cfs_quota_us", kUnlimited);  // -1: none
        period = ReadNumber(folder + "cpu.cfs_period_us", 0);
      }
      cpus = std::min(cpus, CpusOf(quota, period));
    });
  });
  return cpus;
}

}  // namespace kvanta
