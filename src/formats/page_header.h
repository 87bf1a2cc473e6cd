// The JSON header of page files.
#pragma once

#include <string>
#include <string_view>

#include "formats/page_file.h"

namespace kvanta::formats {

std::string PageHeaderToJson(const PageHeader& header);

// Throws InputError with the reason (without the file's name).
PageHeader PageHeaderFromJson(std::string_view text);

}  // namespace kvanta::formats
