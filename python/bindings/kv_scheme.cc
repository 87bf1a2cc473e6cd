#include "kvanta/kv_scheme.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "attention/backends.h"
#include "bindings.h"
#include "formats/cell.h"
#include "formats/cell_codec.h"
#include "formats/format.h"
#include "formats/scheme.h"
#include "key_transform.h"

namespace nb = nanobind;

namespace kvanta::python {
namespace {

using nb::literals::operator""_a;

// A row of `kvanta formats`, as plain values: Format itself is internal.
nb::dict Describe(const formats::Format& format) {
  nb::dict row;
  std::vector<std::string> aliases(format.aliases.begin(), format.aliases.end());
  row["name"] = std::string(format.name);
  row["aliases"] = nb::cast(aliases);
  row["summary"] = std::string(format.summary);
  row["code_bits"] = format.code_bits;
  row["block"] = format.scaling.channels;
  row["hadamard"] = format.hadamard;
  row["exact"] = format.exact == ExactPages::kOpen ? "open" : "none";
  row["sink_pages"] = format.sink_pages;
  row["edge_layers"] = format.boundary_layers;
  row["scale"] = formats::DescribeScaling(format.scaling);
  constexpr const char* kMlaSupport[] = {"never", "also", "only"};
  row["latents"] = kMlaSupport[static_cast<int>(format.latents)];
  row["backends"] = nb::cast(attention::BackendFamiliesOf(format));
  if (format.latents == formats::MlaSupport::kRequired) {
    constexpr int kRank = 512, kRopeDim = 64, kTokens = 64;
    const KvScheme scheme = KvScheme::Parse(format.name);
    const int64_t bytes = formats::PlanCache({scheme}, {{1, kRank, kRopeDim}}, kTokens).page_bytes;
    row["bits_per_element"] = static_cast<double>(bytes) * 8 / (kTokens * (kRank + kRopeDim));
    return row;
  }
  // For one token at a head size of 128, scales included.
  const auto bits = [&](bool is_key) {
    const formats::CellShape shape = {.tokens = 64, .head_dim = 128};
    return static_cast<double>(formats::PlanCell(formats::OnSide(format, is_key), shape).bytes) * 8 / (64 * 128);
  };
  row["bits_per_element"] = (bits(true) + bits(false)) / 2;
  return row;
}

// A cell's scheme and parameters, from a caller's arguments.
struct CellArguments {
  CellArguments(const std::string& scheme_text, const std::string& side_text, float static_scale,
                const std::optional<FloatVector>& mean, const std::optional<Array3f>& query,
                const std::optional<Array3f>& eigen, const std::vector<int>& outliers)
      : scheme(KvScheme::Parse(scheme_text)),
        side(formats::ParseSideKind(side_text)),
        transform(KeyTransform(scheme, side, query, eigen, "")) {
    parameters.static_scale = static_scale;
    if (mean) parameters.mean = {mean->data(), mean->size()};
    parameters.query = transform.get();
    parameters.outliers = outliers;
  }

  KvScheme scheme;
  formats::SideKind side;
  std::shared_ptr<const formats::QueryTransform> transform;
  formats::CellParameters parameters;
};

nb::bytes Encode(const std::string& scheme, const std::string& side, const FloatMatrix& x, float static_scale,
                 const std::optional<FloatVector>& mean, const std::optional<Array3f>& query,
                 const std::optional<Array3f>& eigen, const std::vector<int>& outliers, bool via_bf16) {
  CellArguments cell(scheme, side, static_scale, mean, query, eigen, outliers);
  cell.parameters.via_bf16 = via_bf16;
  const auto bytes = formats::EncodeCell(cell.scheme, cell.side, {x.data(), x.size()},
                                         {static_cast<int>(x.shape(0)), static_cast<int>(x.shape(1))}, cell.parameters);
  return nb::bytes(bytes.data(), bytes.size());
}

nb::object Decode(const std::string& scheme, const std::string& side, const nb::bytes& data, std::pair<int, int> shape,
                  float static_scale, const std::optional<FloatVector>& mean, const std::optional<Array3f>& query,
                  const std::optional<Array3f>& eigen, const std::vector<int>& outliers) {
  const CellArguments cell(scheme, side, static_scale, mean, query, eigen, outliers);
  return ToNumpy(formats::DecodeCell(cell.scheme, cell.side, {static_cast<const uint8_t*>(data.data()), data.size()},
                                     {shape.first, shape.second}, cell.parameters),
                 {static_cast<size_t>(shape.first), static_cast<size_t>(shape.second)});
}

}  // namespace

void BindFormats(nb::module_& module) {
  nb::class_<KvSide>(module, "KvSide", "One side (K or V) of a cache scheme.")
      .def_ro("format", &KvSide::format)
      .def_ro("hadamard", &KvSide::hadamard)
      .def_ro("mean", &KvSide::mean)
      .def_ro("query", &KvSide::query)
      .def_ro("outliers", &KvSide::outliers);
  nb::class_<KvScheme>(module, "KvScheme", "How K and V are stored.")
      .def_static(
          "parse", [](const std::string& text) { return KvScheme::Parse(text); }, "text"_a,
          "From a name or the explicit syntax; raises InputError with the alternatives.")
      .def_ro("k", &KvScheme::k)
      .def_ro("v", &KvScheme::v)
      .def_prop_ro("exact_open", [](const KvScheme& scheme) { return scheme.exact != ExactPages::kNone; })
      .def_ro("sink_pages", &KvScheme::sink_pages)
      .def("__str__", &KvScheme::ToString);
  module.def("format_names", &FormatNames, "Canonical names of all number formats.");
  module.def(
      "format_table",
      [] {
        std::vector<nb::dict> rows;
        for (const formats::Format& format : formats::All()) rows.push_back(Describe(format));
        return rows;
      },
      nb::sig("def format_table() -> list[dict[str, typing.Any]]"), "The table of `kvanta formats`.");
  module.def("encode_cell", &Encode, "scheme"_a, "side"_a, "x"_a, "static_scale"_a, "mean"_a.none(), "query"_a.none(),
             "eigen"_a.none(), "outliers"_a, "through_exact_page"_a);
  module.def(
      "decode_cell", &Decode, "scheme"_a, "side"_a, "data"_a, "shape"_a, "static_scale"_a, "mean"_a.none(),
      "query"_a.none(), "eigen"_a.none(), "outliers"_a,
      nb::sig("def decode_cell(scheme: str, side: str, data: bytes, shape: tuple[int, int], static_scale: float, "
              "mean: typing.Any | None, query: typing.Any | None, eigen: typing.Any | None, outliers: "
              "collections.abc.Sequence[int]) -> numpy.typing.NDArray[numpy.float32]"));
}

}  // namespace kvanta::python
