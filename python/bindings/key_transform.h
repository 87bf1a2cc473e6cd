// K's transform of a scheme with +query, from arrays.
#pragma once

#include <memory>
#include <optional>
#include <string_view>

#include "arrays.h"
#include "formats/cell_layout.h"
#include "formats/query_transform.h"
#include "kvanta/kv_scheme.h"

namespace kvanta::python {

// query: f32 [kv_heads, head_dim, head_dim], of klt3 and klt2 instead eigen: f32 [kv_heads, head_dim + 1, head_dim], as
// k_query and k_eigen of scale files (docs/scales.md). Null for sides without +query. Throws InputError for the wrong
// one of the two, or none where the side has +query; `prefix`: of the arguments' names in messages.
std::shared_ptr<const formats::QueryTransform> KeyTransform(const KvScheme& scheme, formats::SideKind side,
                                                            const std::optional<Array3f>& query,
                                                            const std::optional<Array3f>& eigen,
                                                            std::string_view prefix);

}  // namespace kvanta::python
