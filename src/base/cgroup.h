// Limits of control groups, versions 1 and 2: the memory and the CPUs that a container may use.
#pragma once

#include <cstdint>
#include <string>

namespace kvanta {

// Bytes that the limits of a process's memory cgroup and of its ancestors leave; the largest int64 without a limit.
// `membership`: the process's /proc/PID/cgroup; `mount`: where the hierarchies are mounted.
int64_t CgroupAvailable(const std::string& membership = "/proc/self/cgroup",
                        const std::string& mount = "/sys/fs/cgroup");

// CPUs that the quotas of a process's cgroup and of its ancestors allow, rounded down, at least one; the largest int64
// without a quota. CPU sets are in the affinity mask.
int64_t CgroupCpus(const std::string& membership = "/proc/self/cgroup", const std::string& mount = "/sys/fs/cgroup");

}  // namespace kvanta
