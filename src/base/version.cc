#include "kvanta/version.h"

namespace kvanta {

const char* Version() noexcept {
  return KVANTA_VERSION;
}

}  // namespace kvanta
