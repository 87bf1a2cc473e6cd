#include "kvanta/kv_events.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"

namespace nb = nanobind;

namespace kvanta::python {

void BindKvEvents(nb::module_& module) {
  nb::enum_<KvEventKind>(module, "KvEventKind")
      .value("STORED", KvEventKind::kStored)
      .value("REMOVED", KvEventKind::kRemoved)
      .value("CLEARED", KvEventKind::kCleared);
  nb::class_<KvEvent>(module, "KvEvent", "See include/kvanta/kv_events.h.")
      .def_ro("kind", &KvEvent::kind)
      .def_ro("group", &KvEvent::group)
      .def_ro("block_hash", &KvEvent::block_hash)
      .def_ro("parent_block_hash", &KvEvent::parent_block_hash)
      .def_ro("tokens", &KvEvent::tokens)
      .def_ro("cache_salt", &KvEvent::cache_salt);
}

}  // namespace kvanta::python
