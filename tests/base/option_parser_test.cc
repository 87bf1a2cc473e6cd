// Options of benchmark programs: none is ignored, whatever is wrong with it.
#include "bench/option_parser.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>

namespace kvanta {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

struct Shape {
  int batch;
  int64_t context;
};

struct Options {
  std::string model, json;
  int threads = 2;
  std::vector<int64_t> rows = {1, 8};
  std::vector<std::string> formats = {"bf16"};
  std::vector<Shape> shapes = {{64, 8192}};
};

Options Parse(std::vector<std::string> words) {
  Options options;
  OptionParser parser;
  parser.Positional(options.model);
  parser.Option("--json", options.json);
  parser.Option("--threads", options.threads);
  parser.Option("--rows", options.rows);
  parser.Option("--formats", options.formats);
  parser.Pairs("--shape", options.shapes);
  std::vector<char*> arguments;
  words.insert(words.begin(), "bench");
  for (std::string& word : words) arguments.push_back(word.data());
  parser.Parse(static_cast<int>(arguments.size()), arguments.data());
  return options;
}

TEST(OptionParser, ReadsValuesAndLists) {
  const Options options =
      Parse({"folder", "--threads", "4", "--rows", "3", "5", "--formats", "int8", "--shape", "1x512", "2x99999999999"});
  EXPECT_EQ(options.model, "folder");
  EXPECT_EQ(options.threads, 4);
  EXPECT_THAT(options.rows, ElementsAre(3, 5)) << "instead of those before";
  EXPECT_THAT(options.formats, ElementsAre("int8"));
  ASSERT_EQ(options.shapes.size(), 2u);
  EXPECT_EQ(options.shapes[1].batch, 2);
  EXPECT_EQ(options.shapes[1].context, 99999999999);
  EXPECT_THAT(Parse({}).rows, ElementsAre(1, 8));
}

TEST(OptionParser, RefusesWhatItWouldIgnore) {
  const std::pair<std::vector<std::string>, const char*> cases[] = {
      {{"--thread", "4"}, "unknown option --thread; known: --formats, --json, --rows, --shape, --threads"},
      {{"--fast"}, "unknown option --fast"},
      {{"--json"}, "--json needs a value"},
      {{"--rows", "--json", "a"}, "--rows needs a value"},
      {{"--threads", "4", "5"}, "--threads takes one value, got 5, too"},
      {{"--threads", "4x"}, "--threads 4x: not a whole number of at most 2147483647"},
      {{"--threads", "9999999999"}, "not a whole number"},
      {{"--shape", "8192"}, "--shape 8192: not as in 64x8192"},
      {{"--shape", "64xlong"}, "--shape long: not a whole number"},
      {{"folder", "other"}, "other belongs to no option"},
  };
  for (const auto& [words, message] : cases) {
    EXPECT_THAT([&words = words] { Parse(words); }, ThrowsMessage<InputError>(HasSubstr(message))) << message;
  }
}

}  // namespace
}  // namespace kvanta
