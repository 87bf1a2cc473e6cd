// Attention on the caller's arrays, and its benchmark.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "attention/array_attention.h"
#include "attention/backends.h"
#include "bench/attention_bench.h"
#include "bench/gpu_bench.h"
#include "bench/roofline.h"
#include "bindings.h"
#include "kernels/cpu/select.h"
#include "key_transform.h"
#include "kvanta/error.h"

namespace nb = nanobind;

namespace kvanta::python {
namespace {

using nb::literals::operator""_a;

using attention::ArrayAttention;
using attention::ArrayAttentionResult;
using attention::AttentionBench;
using attention::AttentionBenchRow;

template <typename Array>
std::span<const float> Span(const Array& array) {
  return {array.data(), array.size()};
}

template <typename Array>
std::vector<float> Values(const std::optional<Array>& array) {
  if (!array) return {};
  return {array->data(), array->data() + array->size()};
}

nb::tuple RunArrays(const Array3f& q, const Array3f& k, const Array3f& v, const std::string& scheme,
                    const std::string& backend, int64_t query_start, int page_size, int threads, float softmax_scale,
                    float softcap, int sliding_window, const std::optional<FloatVector>& k_scale,
                    const std::optional<FloatVector>& v_scale, const std::optional<FloatMatrix>& k_mean,
                    const std::optional<Array3f>& k_query, const std::optional<Array3f>& k_eigen,
                    std::vector<int> k_outliers) {
  for (size_t axis = 0; axis < 3; ++axis) {
    if (k.shape(axis) != v.shape(axis))
      throw InputError("k and v must have the same shape [tokens, kv_heads, head_dim]");
  }
  if (q.shape(2) != k.shape(2)) throw InputError("q, k and v must have the same head_dim, their last axis");
  ArrayAttention options;
  options.scheme = scheme;
  options.backend = backend;
  options.heads = static_cast<int>(q.shape(1));
  options.kv_heads = static_cast<int>(k.shape(1));
  options.head_dim = static_cast<int>(q.shape(2));
  options.page_size = page_size;
  options.threads = threads;
  options.softmax_scale = softmax_scale;
  options.softcap = softcap;
  options.sliding_window = sliding_window;
  formats::SideScales& keys = options.scales.k;
  keys.scale = Values(k_scale);
  keys.mean = Values(k_mean);
  keys.outliers = std::move(k_outliers);
  keys.query = KeyTransform(KvScheme::Parse(scheme), formats::SideKind::kK, k_query, k_eigen, "k_");
  options.scales.v.scale = Values(v_scale);
  ArrayAttentionResult result;
  {
    nb::gil_scoped_release release;
    result = attention::RunArrayAttention(options, Span(q), Span(k), Span(v), query_start);
  }
  nb::object out = ToNumpy(std::move(result.out), {q.shape(0), q.shape(1), q.shape(2)});
  return nb::make_tuple(out, result.cache_bytes, result.saturated);
}

nb::dict RowDict(const AttentionBenchRow& row) {
  nb::dict result;
  result["format"] = row.format;
  result["isa"] = row.isa;
  result["threads"] = row.threads;
  result["batch"] = row.batch;
  result["context"] = row.context;
  result["query_tokens"] = row.query_tokens;
  result["bytes"] = row.bytes;
  result["ns_min"] = row.ns_min;
  result["ns_median"] = row.ns_median;
  result["bf16_ns"] = row.bf16_ns;
  result["in_cache_ns"] = row.in_cache_ns;
  result["memory_ns"] = row.memory_ns;
  result["dot_ns"] = row.dot_ns;
  result["share_of_limit"] = row.share_of_limit;
  result["share_of_bf16_peak"] = row.share_of_bf16_peak;
  result["times_bf16"] = row.times_bf16;
  result["read_gb_s"] = row.read_gb_s;
  result["gb_s"] = row.gb_s;
  result["gelem_s"] = row.gelem_s;
  result["max_error"] = row.max_error;
  return result;
}

AttentionBench BenchOptions(std::vector<std::string> formats, int heads, int kv_heads, int head_dim, int page_size,
                            int batch, int64_t context, int query_tokens, double seconds) {
  AttentionBench options;
  options.formats = std::move(formats);
  options.heads = heads;
  options.kv_heads = kv_heads;
  options.head_dim = head_dim;
  options.page_size = page_size;
  options.batch = batch;
  options.context = context;
  options.query_tokens = query_tokens;
  options.seconds = seconds;
  return options;
}

// run(what to call after each row), without the GIL.
template <typename Run>
auto RowsOf(const nb::callable& measured, Run&& run) {
  const nb::gil_scoped_release release;
  return run([&measured] {
    const nb::gil_scoped_acquire gil;
    measured();
  });
}

std::vector<nb::dict> RunBench(std::vector<std::string> formats, const std::string& isa, std::vector<int> threads,
                               int heads, int kv_heads, int head_dim, int page_size, int layers, int batch,
                               int64_t context, int query_tokens, double seconds, const nb::callable& measured) {
  AttentionBench options =
      BenchOptions(std::move(formats), heads, kv_heads, head_dim, page_size, batch, context, query_tokens, seconds);
  options.isa = isa;
  options.layers = layers;
  options.threads = std::move(threads);
  const std::vector<AttentionBenchRow> rows =
      RowsOf(measured, [&](const auto& after) { return attention::RunAttentionBench(options, after); });
  std::vector<nb::dict> result;
  for (const AttentionBenchRow& row : rows) result.push_back(RowDict(row));
  return result;
}

std::vector<nb::dict> RunGpu(std::vector<std::string> formats, int heads, int kv_heads, int head_dim, int page_size,
                             int batch, int64_t context, int query_tokens, double seconds,
                             const nb::callable& measured) {
  if (const std::string missing = kernels::MissingForCuda(); !missing.empty()) {
    throw InputError("device cuda: " + missing + "; there are: cpu");
  }
  const AttentionBench options =
      BenchOptions(std::move(formats), heads, kv_heads, head_dim, page_size, batch, context, query_tokens, seconds);
  const std::vector<attention::GpuBenchRow> rows = RowsOf(measured, [&](const auto& after) {
    return attention::RunGpuBench(options, kernels::MakeCudaContext(), size_t{256} << 20, after);
  });
  std::vector<nb::dict> result;
  for (const attention::GpuBenchRow& row : rows) {
    nb::dict fields;
    fields["format"] = row.format;
    fields["unit"] = row.unit;
    fields["batch"] = row.batch;
    fields["context"] = row.context;
    fields["query_tokens"] = row.query_tokens;
    fields["bytes"] = row.bytes;
    fields["ns_min"] = row.ns_min;
    fields["ns_median"] = row.ns_median;
    fields["copy_gb_s"] = row.copy_gb_s;
    fields["gb_s"] = row.gb_s;
    fields["share_of_limit"] = row.share_of_limit;
    fields["max_error"] = row.max_error;
    result.push_back(fields);
  }
  return result;
}

}  // namespace

void BindAttention(nb::module_& module) {
  module.def(
      "read_limit_gb_s",
      [](int threads, const std::string& isa) {
        return kernels::MeasureReadBandwidth(threads, kernels::SelectIsa(isa)) / 1e9;
      },
      "threads"_a, "isa"_a, nb::call_guard<nb::gil_scoped_release>());
  module.def(
      "selected_isa", [](const std::string& isa) { return kernels::SelectedIsa(isa); }, "isa"_a,
      "Name of the CPU unit that runs for `isa`: a unit's name, or \"auto\", which KVANTA_ISA may override.");
  module.def("backend_names", &attention::BackendNames, "Backends that this machine runs, best first.");
  module.def(
      "run_array_attention", &RunArrays, "q"_a, "k"_a, "v"_a, "scheme"_a, "backend"_a, "query_start"_a, "page_size"_a,
      "threads"_a, "softmax_scale"_a, "softcap"_a, "sliding_window"_a, "k_scale"_a.none(), "v_scale"_a.none(),
      "k_mean"_a.none(), "k_query"_a.none(), "k_eigen"_a.none(), "k_outliers"_a,
      nb::sig("def run_array_attention(q: numpy.typing.NDArray[numpy.float32], k: "
              "numpy.typing.NDArray[numpy.float32], v: numpy.typing.NDArray[numpy.float32], scheme: str, backend: "
              "str, query_start: int, page_size: int, threads: int, softmax_scale: float, softcap: float, "
              "sliding_window: int, k_scale: numpy.typing.NDArray[numpy.float32] | None, v_scale: "
              "numpy.typing.NDArray[numpy.float32] | None, k_mean: numpy.typing.NDArray[numpy.float32] | None, "
              "k_query: numpy.typing.NDArray[numpy.float32] | None, k_eigen: numpy.typing.NDArray[numpy.float32] | "
              "None, k_outliers: collections.abc.Sequence[int]) -> "
              "tuple[numpy.typing.NDArray[numpy.float32], int, int]"),
      "(out [query_tokens, heads, head_dim], cache_bytes, saturated)");
  module.def(
      "run_attention_bench", &RunBench, "formats"_a, "isa"_a, "threads"_a, "heads"_a, "kv_heads"_a, "head_dim"_a,
      "page_size"_a, "layers"_a, "batch"_a, "context"_a, "query_tokens"_a, "seconds"_a, "measured"_a,
      nb::sig("def run_attention_bench(formats: collections.abc.Sequence[str], isa: str, threads: "
              "collections.abc.Sequence[int], heads: int, kv_heads: int, head_dim: int, page_size: int, layers: int, "
              "batch: int, context: int, query_tokens: int, seconds: float, measured: "
              "collections.abc.Callable[[], object]) -> list[dict[str, typing.Any]]"));
  module.def("run_gpu_attention_bench", &RunGpu, "formats"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "page_size"_a,
             "batch"_a, "context"_a, "query_tokens"_a, "seconds"_a, "measured"_a,
             nb::sig("def run_gpu_attention_bench(formats: collections.abc.Sequence[str], heads: int, kv_heads: int, "
                     "head_dim: int, page_size: int, batch: int, context: int, query_tokens: int, seconds: float, "
                     "measured: collections.abc.Callable[[], object]) -> list[dict[str, typing.Any]]"));
}

}  // namespace kvanta::python
