// Folders of kv_cache_dir, without an engine.
#include "kvanta/cache_folder.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"

namespace nb = nanobind;

namespace kvanta::python {

using nb::literals::operator""_a;
using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;

void BindCacheFolder(nb::module_& module) {
  nb::class_<CacheFolderEntry>(module, "CacheFolderEntry", "Pages of one model and cache format.")
      .def_ro("name", &CacheFolderEntry::name)
      .def_ro("identity", &CacheFolderEntry::identity)
      .def_ro("files", &CacheFolderEntry::files)
      .def_ro("bytes", &CacheFolderEntry::bytes)
      .def_ro("pages", &CacheFolderEntry::pages)
      .def_ro("last_used", &CacheFolderEntry::last_used)
      .def_ro("damaged", &CacheFolderEntry::damaged);
  nb::class_<PageFileInfo>(module, "PageFileInfo", "Header of a page file.")
      .def_ro("version", &PageFileInfo::version)
      .def_ro("identity_key", &PageFileInfo::identity_key)
      .def_ro("key", &PageFileInfo::key)
      .def_ro("identity", &PageFileInfo::identity)
      .def_ro("group", &PageFileInfo::group)
      .def_ro("exact", &PageFileInfo::exact)
      .def_ro("tokens", &PageFileInfo::tokens)
      .def_ro("payload_bytes", &PageFileInfo::payload_bytes)
      .def_ro("checksum", &PageFileInfo::checksum)
      .def_ro("fault", &PageFileInfo::fault);
  module.def("show_page_file", &ShowPageFile, "path"_a, ReleaseGil());
  module.def("list_cache_folder", &ListCacheFolder, "folder"_a, ReleaseGil());
  module.def("verify_cache_folder", &VerifyCacheFolder, "folder"_a, ReleaseGil(),
             "Reads every file; damaged ones are named, not removed.");
  module.def("clear_cache_folder", &ClearCacheFolder, "folder"_a, ReleaseGil(), "Removes all pages: number of files.");
}

}  // namespace kvanta::python
