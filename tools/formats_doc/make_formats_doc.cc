// Writes docs/formats.md: its template with every @SECTION@ filled in from the list of formats.
//
//   make_formats_doc TEMPLATE FILE           writes FILE
//   make_formats_doc --check TEMPLATE FILE   exit status 1 if FILE is not what would be written
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "sections.h"

namespace {

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::string Fill(std::string text) {
  using namespace kvanta::formats_doc;
  const std::vector<std::pair<std::string, std::string (*)()>> sections = {
      {"@FORMATS@", &FormatTable},   {"@DETAILS@", &FormatDetails}, {"@LEVELS@", &LevelTable},
      {"@TRELLIS@", &TrellisLevels}, {"@SCHEMES@", &SchemeTable},   {"@COMPAT@", &CompatTable},
      {"@GOLDEN@", &GoldenVectors}};
  for (const auto& [mark, make] : sections) {
    const size_t at = text.find(mark);
    if (at == std::string::npos) throw std::runtime_error("the template lacks " + mark);
    text.replace(at, mark.size(), make());
  }
  return text;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  const bool check = arguments.size() == 3 && arguments[0] == "--check";
  if (!check && arguments.size() != 2) {
    std::fputs("usage: make_formats_doc [--check] TEMPLATE FILE\n", stderr);
    return 2;
  }
  const std::string& path = arguments.back();
  try {
    const std::string text = Fill(ReadFile(arguments[arguments.size() - 2]));
    if (check && ReadFile(path) != text) {
      std::fprintf(stderr, "%s is out of date: build the target formats_doc\n", path.c_str());
      return 1;
    }
    if (!check && !(std::ofstream(path, std::ios::binary) << text)) throw std::runtime_error("cannot write " + path);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
