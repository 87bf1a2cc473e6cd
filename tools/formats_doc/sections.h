// The parts of docs/formats.md that come from the list of formats.
#pragma once

#include <string>

namespace kvanta::formats_doc {

std::string FormatTable();    // name, aliases, bits, shape, defaults, measured distortion
std::string FormatDetails();  // each format: its rule, its code's bits, its cell drawn
std::string LevelTable();     // what the fields of codes below 8 bits stand for
std::string TrellisLevels();  // levels of t2, t3 and t4 by window
std::string SchemeTable();    // scheme texts and what they mean
std::string CompatTable();    // names of other engines and of later versions
std::string GoldenVectors();  // bytes of one row in every format

}  // namespace kvanta::formats_doc
