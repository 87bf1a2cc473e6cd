// KVANTA_ISA for the length of a test.
#pragma once

#include <cstdlib>
#include <string>

namespace kvanta {

// Sets KVANTA_ISA, or unsets it for null, and restores its previous value on destruction.
class IsaEnvironment {
 public:
  explicit IsaEnvironment(const char* value) {
    if (const char* before = std::getenv("KVANTA_ISA")) before_ = before;
    value == nullptr ? unsetenv("KVANTA_ISA") : setenv("KVANTA_ISA", value, 1);
  }
  ~IsaEnvironment() { before_.empty() ? unsetenv("KVANTA_ISA") : setenv("KVANTA_ISA", before_.c_str(), 1); }
  IsaEnvironment(const IsaEnvironment&) = delete;
  IsaEnvironment& operator=(const IsaEnvironment&) = delete;

 private:
  std::string before_;
};

}  // namespace kvanta
