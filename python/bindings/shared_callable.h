// A Python callable that may be copied and freed on any thread.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <utility>

namespace kvanta::python {

using SharedCallable = std::shared_ptr<nanobind::callable>;

// With the GIL, which a call of the result needs, too.
inline SharedCallable ShareCallable(nanobind::callable callable) {
  return {new nanobind::callable(std::move(callable)), [](nanobind::callable* owned) {
            const nanobind::gil_scoped_acquire gil;
            delete owned;
          }};
}

}  // namespace kvanta::python
