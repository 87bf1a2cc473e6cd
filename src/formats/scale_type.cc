#include "formats/scale_type.h"

#include <fmt/format.h>

namespace kvanta::formats {

std::string DescribeScaling(const Scaling& scaling) {
  std::string text;
  const auto add = [&text](const std::string& part) { text += (text.empty() ? "" : " and ") + part; };
  const auto plane = [](ScaleType type, bool zero, const std::string& group) {
    return fmt::format("{}{} per {}", Name(type), zero ? " with a zero" : "", group);
  };
  if (scaling.block != ScaleType::kNone) {
    add(plane(scaling.block, scaling.block_zero,
              fmt::format("{}{} channels", scaling.short_rows ? "up to " : "", scaling.channels)));
  }
  if (scaling.token != ScaleType::kNone) add(plane(scaling.token, scaling.token_zero, "(token, head)"));
  if (scaling.tile != 0) add(plane(ScaleType::kFp16, true, fmt::format("channel of {} tokens", scaling.tile)));
  if (scaling.per_head) add("static f32 per head");
  return text.empty() ? "none" : text;
}

}  // namespace kvanta::formats
