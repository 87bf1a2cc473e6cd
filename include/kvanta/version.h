// Version of the library. The build defines KVANTA_VERSION from the project's one version number (CMakeLists.txt).
#pragma once

namespace kvanta {

// "major.minor.patch".
const char* Version() noexcept;

}  // namespace kvanta
