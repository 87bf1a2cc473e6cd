#include "kvanta/error.h"

#include "bindings.h"

namespace nb = nanobind;

namespace kvanta::python {

// The classes live in kvanta/errors.py, so that the pure Python parts raise the same ones.
void BindErrors(nb::module_& module) {
  (void)module;
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const InputError& error) {
      PyErr_SetString(nb::module_::import_("kvanta.errors").attr("InputError").ptr(), error.what());
    } catch (const QueueFullError& error) {
      PyErr_SetString(nb::module_::import_("kvanta.errors").attr("QueueFullError").ptr(), error.what());
    } catch (const ResourceError& error) {
      PyErr_SetString(nb::module_::import_("kvanta.errors").attr("ResourceError").ptr(), error.what());
    }
  });
}

}  // namespace kvanta::python
