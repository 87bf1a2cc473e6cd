#include "kvanta/error.h"

#include <iterator>
#include <string_view>

#include "bindings.h"
#include "kvanta/rank_lost_error.h"

namespace nb = nanobind;

namespace kvanta::python {

namespace {

// Raises a class of kvanta/errors.py: the pure Python parts raise the same ones. A file's name in a message may have
// bytes that are no UTF-8. Where Python runs a signal's handler first, that one's exception is raised.
template <class... Arguments>
void Raise(const char* name, const Error& error, const Arguments&... arguments) {
  try {
    const std::string_view text = error.what();
    const auto message = nb::steal(PyUnicode_DecodeUTF8(text.data(), std::ssize(text), "replace"));
    const nb::object type = nb::module_::import_("kvanta.errors").attr(name);
    PyErr_SetObject(type.ptr(), type(message, arguments...).ptr());
  } catch (nb::python_error& raised) {
    raised.restore();
  }
}

}  // namespace

void BindErrors(nb::module_& module) {
  (void)module;
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const InputError& error) {
      const std::string_view field = error.Field();
      Raise("InputError", error, field.empty() ? nb::object(nb::none()) : nb::object(nb::str(field.data())));
    } catch (const QueueFullError& error) {
      Raise("QueueFullError", error);
    } catch (const RankLostError& error) {
      Raise("RankLostError", error);
    } catch (const ResourceError& error) {
      Raise("ResourceError", error);
    }
  });
}

}  // namespace kvanta::python
