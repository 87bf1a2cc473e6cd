// Constraints whose state is a Python object, and a BitmaskFn that calls Python once per step.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "kvanta/constraint.h"

namespace kvanta::python {

// Python's handle; a request shares ownership of the constraint.
struct ConstraintHandle {
  std::shared_ptr<TokenConstraint> constraint;
};

// fill(states: list, taken: list[list[int]], masks: numpy uint32 [states, words]) -> list[Exception | None]: an error
// or None for each; an InputError is the request's own fault.
BitmaskFn PythonBitmaskFn(nanobind::callable fill);

}  // namespace kvanta::python
