// Sweeps of which a run takes samples: each pair of their parameters occurs, and scripts/test --all takes all.
#pragma once

#include <cstdlib>

namespace kvanta::testing {

inline bool AllCases() {
  return std::getenv("KVANTA_ALL_CASES") != nullptr;
}

}  // namespace kvanta::testing
