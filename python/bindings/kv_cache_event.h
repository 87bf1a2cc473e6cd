// KvCacheEvent in Python: a tuple (position, first_page, end_page, level).
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <tuple>

#include "kvanta/kv_scheme.h"

namespace nanobind::detail {

template <>
struct type_caster<kvanta::KvCacheEvent> {
  using Fields = std::tuple<int64_t, int64_t, int64_t, int>;
  NB_TYPE_CASTER(kvanta::KvCacheEvent, make_caster<Fields>::Name)

  bool from_python(handle source, uint8_t flags, cleanup_list* cleanup) noexcept {
    make_caster<Fields> fields;
    if (!fields.from_python(source, flags, cleanup)) return false;
    std::tie(value.position, value.first_page, value.end_page, value.level) = fields.operator cast_t<Fields>();
    return true;
  }
  static handle from_cpp(const kvanta::KvCacheEvent& event, rv_policy policy, cleanup_list* cleanup) noexcept {
    return make_caster<Fields>::from_cpp(Fields(event.position, event.first_page, event.end_page, event.level), policy,
                                         cleanup);
  }
};

}  // namespace nanobind::detail
