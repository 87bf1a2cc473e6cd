// Models and caches before an engine is built: read_model_info, plan_cache_bytes.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "kvanta/engine.h"
#include "models/model.h"
#include "stats.h"
#include "weights/gguf_index.h"

namespace nb = nanobind;

namespace kvanta::python {

using nb::literals::operator""_a;

void BindModelInfo(nb::module_& module) {
  nb::class_<ModelInfo>(module, "ModelInfo", "What a model is.")
      .def_ro("architecture", &ModelInfo::architecture)
      .def_ro("dtype", &ModelInfo::dtype)
      .def_ro("layers", &ModelInfo::layers)
      .def_ro("hidden", &ModelInfo::hidden)
      .def_ro("heads", &ModelInfo::heads)
      .def_ro("kv_heads", &ModelInfo::kv_heads)
      .def_ro("head_dim", &ModelInfo::head_dim)
      .def_ro("rope_dim", &ModelInfo::rope_dim)
      .def_ro("vocab", &ModelInfo::vocab)
      .def_ro("max_position", &ModelInfo::max_position)
      .def_ro("parameters", &ModelInfo::parameters)
      .def_ro("weight_bytes", &ModelInfo::weight_bytes)
      .def_ro("layer_heads", &ModelInfo::layer_heads)
      .def_ro("sliding_window", &ModelInfo::sliding_window)
      .def_rw("eos_token_ids", &ModelInfo::eos_token_ids)
      .def_ro("has_lm_head", &ModelInfo::has_lm_head)
      .def_ro("embedding_size", &ModelInfo::embedding_size)
      .def_ro("declared_kv_cache", &ModelInfo::declared_kv_cache)
      .def_ro("declared_kv_cache_error", &ModelInfo::declared_kv_cache_error)
      .def_ro("hash", &ModelInfo::hash);
  nb::class_<CachePlan>(module, "CachePlan", "Bytes of a cache.")
      .def_ro("kv_cache_dtype", &CachePlan::kv_cache_dtype)
      .def_ro("bits_per_element", &CachePlan::bits_per_element)
      .def_ro("page_bytes", &CachePlan::page_bytes)
      .def_ro("exact_page_bytes", &CachePlan::exact_page_bytes)
      .def_ro("exact_pages_per_sequence", &CachePlan::exact_pages_per_sequence)
      .def_ro("bytes_per_token", &CachePlan::bytes_per_token)
      .def_ro("floor_bytes_per_token", &CachePlan::floor_bytes_per_token)
      .def_ro("sequence_bytes", &CachePlan::sequence_bytes)
      .def_ro("draft_page_bytes", &CachePlan::draft_page_bytes)
      .def_ro("draft_exact_bytes", &CachePlan::draft_exact_bytes)
      .def_ro("draft_state_bytes", &CachePlan::draft_state_bytes)
      .def_prop_ro(
          "groups", [](const CachePlan& plan) { return GroupDicts(plan.groups); },
          nb::sig("def groups(self) -> list[dict[str, typing.Any]]"));
  module.def("read_model_info", &ReadModelInfo, "model"_a, "dtype"_a = "auto", "weight_dtype"_a = "auto",
             nb::call_guard<nb::gil_scoped_release>(), "Reads the configuration only; weights are not needed.");
  module.def("architectures", &models::KnownArchitectures,
             "Classes of models that are read, as config.json names them.");
  module.def("gguf_types", &weights::GgufTypes, "Types of GGUF tensors that are used as they are stored.");
  module.def("plan_cache_bytes", &PlanCacheBytes, "config"_a, nb::call_guard<nb::gil_scoped_release>(),
             "Bytes of a cache, without building one.");
  module.def("decoder_prefix", &DecoderPrefix, "model"_a, nb::call_guard<nb::gil_scoped_release>(),
             "Beginning of the names of the decoder's tensors in a folder's weights.");
  nb::class_<MissingMatrices>(module, "MissingMatrices")
      .def_ro("fingerprint", &MissingMatrices::fingerprint)
      .def_ro("eigen_channels", &MissingMatrices::eigen_channels);
  module.def("missing_query_matrices", &MissingQueryMatrices, "config"_a, nb::call_guard<nb::gil_scoped_release>(),
             "Matrices of +query that the engine lacks; with an empty fingerprint, none.");
}

}  // namespace kvanta::python
