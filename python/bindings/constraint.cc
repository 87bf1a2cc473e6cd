#include "constraint.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "shared_callable.h"

namespace nb = nanobind;

namespace kvanta::python {
namespace {

using nb::literals::operator""_a;

// References to release later. A constraint is destroyed on any thread and while the engine is locked, where waiting
// for the GIL could deadlock; the next caller that holds the GIL releases them.
class DeferredDecrefs {
 public:
  void Add(PyObject* object) noexcept {
    const std::lock_guard lock(mutex_);
    try {
      objects_.push_back(object);
    } catch (...) {  // no memory: the object is never freed
    }
  }
  // With the GIL.
  void Free() {
    std::vector<PyObject*> objects;
    {
      const std::lock_guard lock(mutex_);
      objects.swap(objects_);
    }
    for (PyObject* object : objects) Py_DECREF(object);
  }

 private:
  std::mutex mutex_;
  std::vector<PyObject*> objects_;
};

DeferredDecrefs& TheDeferredDecrefs() {
  static auto* deferred = new DeferredDecrefs;  // outlives every engine
  return *deferred;
}

struct PythonConstraint final : TokenConstraint {
  explicit PythonConstraint(nb::object object) : state(object.release().ptr()) {}
  ~PythonConstraint() override { TheDeferredDecrefs().Add(state); }
  PythonConstraint(const PythonConstraint&) = delete;
  PythonConstraint& operator=(const PythonConstraint&) = delete;

  PyObject* state;
};

void FillMasks(const nb::callable& fill, std::span<MaskTask> tasks) {
  TheDeferredDecrefs().Free();
  nb::list states, taken;
  for (const MaskTask& task : tasks) {
    states.append(nb::borrow(dynamic_cast<PythonConstraint&>(*task.constraint).state));
    taken.append(nb::cast(std::vector<int32_t>(task.taken.begin(), task.taken.end())));
  }
  const nb::ndarray<nb::numpy, uint32_t, nb::ndim<2>> masks(tasks[0].mask.data(), {tasks.size(), tasks[0].mask.size()},
                                                            nb::handle());
  const nb::list errors(fill(states, taken, nb::cast(masks, nb::rv_policy::reference)));
  if (errors.size() != tasks.size()) throw std::runtime_error("fill_masks returned the wrong number of errors");
  const nb::object input_error = nb::module_::import_("kvanta.errors").attr("InputError");
  for (size_t i = 0; i < tasks.size(); ++i) {
    const nb::handle error = errors[i];
    if (error.is_none()) continue;
    tasks[i].error = nb::cast<std::string>(nb::str(error));
    tasks[i].invalid_input = nb::isinstance(error, input_error);
  }
}

// Raises the exception of a signal's handler (KeyboardInterrupt, SystemExit) in the main thread, where handlers run, as
// soon as the step returns to Python: the error of a request would hide it.
void RaiseAfterStep(nb::python_error&& error) {
  auto* kept = new nb::python_error(std::move(error));
  const auto raise = [](void* kept_error) {
    const std::unique_ptr<nb::python_error> owned(static_cast<nb::python_error*>(kept_error));
    owned->restore();
    return -1;
  };
  if (Py_AddPendingCall(raise, kept) == 0) return;
  kept->discard_as_unraisable("fill_masks");  // too many others are pending
  delete kept;
}

}  // namespace

BitmaskFn PythonBitmaskFn(nb::callable fill) {
  return [shared = ShareCallable(std::move(fill))](std::span<MaskTask> tasks) {
    const nb::gil_scoped_acquire gil;
    try {
      FillMasks(*shared, tasks);
    } catch (nb::python_error& error) {  // must be destroyed while the GIL is held
      const std::string message = error.what();
      const bool is_fault = error.matches(PyExc_Exception);
      if (!is_fault) RaiseAfterStep(std::move(error));
      throw std::runtime_error(is_fault ? message.substr(message.find_last_of('\n') + 1) : "interrupted");
    }
  };
}

void BindConstraint(nb::module_& module) {
  nb::class_<ConstraintHandle>(module, "TokenConstraint",
                               "Grammar state of one request; see kvanta.constraints.structured_output.")
      .def(
          "__init__",
          [](ConstraintHandle* self, nb::object state) {
            TheDeferredDecrefs().Free();
            new (self) ConstraintHandle{std::make_shared<PythonConstraint>(std::move(state))};
          },
          "state"_a, "`state` is passed to the callable of EngineConfig.set_fill_masks. For one request only.");
}

}  // namespace kvanta::python
