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

// Minimum over `group` and its ancestors of limit minus usage. A container sees its own group at the mount's root.
int64_t Available(const Hierarchy& hierarchy, std::string group) {
  int64_t available = kUnlimited;
  for (;;) {
    const std::string folder = hierarchy.mount + (group == "/" ? std::string() : group) + "/";
    const int64_t limit = ReadNumber(folder + hierarchy.limit, kUnlimited);
    if (limit != kUnlimited) {
      // Usage includes page cache (gigabytes after reading a checkpoint), whose inactive pages are reclaimable.
      const int64_t cached = ReadStat(folder + "memory.stat", hierarchy.inactive_file);
      const int64_t used = std::max<int64_t>(0, ReadNumber(folder + hierarchy.usage, 0) - cached);
      available = std::min(available, std::max<int64_t>(0, limit - used));
    }
    if (group.empty() || group == "/") return available;
    group.resize(group.find_last_of('/'));
  }
}

// True if the comma-separated `list` contains "memory".
bool HasMemory(std::string_view list) {
  while (!list.empty()) {
    const size_t end = std::min(list.find(','), list.size());
    if (list.substr(0, end) == "memory") return true;
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return false;
}

}  // namespace

int64_t CgroupAvailable(const std::string& membership, const std::string& mount) {
  int64_t available = kUnlimited;
  std::ifstream file(membership);
  for (std::string line; std::getline(file, line);) {  // "ID:CONTROLLERS:GROUP"; version 2: "0::GROUP"
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string_view controllers = std::string_view(line).substr(first + 1, second - first - 1);
    const std::string group = line.substr(second + 1);
    if (controllers.empty()) {
      available = std::min(available, Available({mount, "memory.max", "memory.current", "inactive_file"}, group));
    } else if (HasMemory(controllers)) {
      available = std::min(available, Available({mount + "/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                                                 "total_inactive_file"},
                                                group));
    }
  }
  return available;
}

}  // namespace kvanta
