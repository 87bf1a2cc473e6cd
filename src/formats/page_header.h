// Encoding of the pages of a cache, as JSON: in the identity of pages outside of the engine, which page files name or
// hold (store/page_file.h).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "formats/scheme.h"

namespace kvanta::formats {

struct PageHeader {
  std::string model;  // identity of the model, as its owner defines it
  CacheLayout layout;
  std::vector<LayerScales> scales;  // per layer; empty if no side has a static scale or a mean
};

// The same text for the same encoding, and no other: layouts and scales are compared by it.
std::string PageHeaderToJson(const PageHeader& header);
// Trusts nothing in `text`; throws InputError with the reason.
PageHeader PageHeaderFromJson(std::string_view text);

}  // namespace kvanta::formats
