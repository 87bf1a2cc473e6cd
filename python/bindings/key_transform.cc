#include "key_transform.h"

#include <fmt/format.h>

#include <span>
#include <vector>

#include "formats/format.h"
#include "kvanta/error.h"

namespace kvanta::python {

std::shared_ptr<const formats::QueryTransform> KeyTransform(const KvScheme& scheme, formats::SideKind side,
                                                            const std::optional<Array3f>& query,
                                                            const std::optional<Array3f>& eigen,
                                                            std::string_view prefix) {
  const bool is_key = side == formats::SideKind::kK;
  if (!is_key || !scheme.k.query) {
    if (!query && !eigen) return nullptr;
    throw InputError(fmt::format("scheme {}: {}{} is given, but {} has no +query", scheme.ToString(), prefix,
                                 query ? "query" : "eigen", is_key ? "K" : "V"));
  }
  const formats::Format& format = formats::Find(scheme.k.format);
  const bool uneven = formats::IsAllocated(format.code);
  const std::optional<Array3f>& given = uneven ? eigen : query;
  if (!given || (uneven ? query : eigen)) {
    throw InputError(
        fmt::format("scheme {0}: K takes {1}{2} and {1}mean, and no {1}{3}; `kvanta calibrate --query` and "
                    "kvanta.calibration.calibrate(..., query=True) make them",
                    scheme.ToString(), prefix, uneven ? "eigen" : "query", uneven ? "query" : "eigen"));
  }
  const auto kv_heads = static_cast<int>(given->shape(0)), head_dim = static_cast<int>(given->shape(2));
  const std::span<const float> values(given->data(), given->size());
  if (uneven) {
    return formats::MakeKltTransform(formats::SplitEigenChannels(values, head_dim), kv_heads, head_dim,
                                     format.code_bits, format.scaling.channel_bits);
  }
  return std::make_shared<formats::QueryTransform>(std::vector<float>(values.begin(), values.end()), kv_heads,
                                                   head_dim);
}

}  // namespace kvanta::python
