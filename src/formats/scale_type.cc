#include "formats/scale_type.h"

#include <fmt/format.h>

namespace kvanta::formats {

std::string DescribeScaling(const Scaling& scaling) {
  std::string text;
  const auto add = [&text](const std::string& part) { text += (text.empty() ? "" : " and ") + part; };
  const auto section = [](ScaleType type, bool offset, const std::string& group) {
    return fmt::format("{}{} per {}", Name(type), offset ? " with a zero" : "", group);
  };
  if (scaling.block != ScaleType::kNone) {
    add(section(scaling.block, scaling.block_offset,
                fmt::format("{}{} channels", scaling.allow_partial_block ? "up to " : "", scaling.channels)));
  }
  if (scaling.token != ScaleType::kNone) add(section(scaling.token, scaling.token_offset, "(token, head)"));
  if (scaling.channel_bits) {
    add(fmt::format("4 bits per channel of {} tokens", scaling.token_group));
  } else if (scaling.token_group != 0) {
    add(section(ScaleType::kFp16, true, fmt::format("channel of {} tokens", scaling.token_group)));
  }
  if (scaling.per_head) add("static f32 per head");
  return text.empty() ? "none" : text;
}

}  // namespace kvanta::formats
