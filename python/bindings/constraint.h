// Constraints whose state is a Python object, and the filler that asks Python for all masks of a step at once.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "kvanta/constraint.h"

namespace kvanta::python {

// What Python holds; a request takes a share of the constraint.
struct ConstraintHandle {
  std::shared_ptr<TokenConstraint> constraint;
};

// fill(states: list, taken: list[list[int]], masks: numpy uint32 [states, words]) -> list[str]: an error or "" for
// each.
BitmaskFn PythonBitmaskFn(nanobind::callable fill);

}  // namespace kvanta::python
