// Requests that another engine goes on with (Request::generated): the same tokens and log-probabilities as if one
// engine had run them to their end.
#include <gtest/gtest.h>

#include "engine/format_cases.h"
#include "engine/requests.h"
#include "error_of.h"

namespace kvanta::engine {
namespace {

class ContinuedFormats : public testing::TestWithParam<FormatCase> {};

TEST_P(ContinuedFormats, ARequestGoesOnWithTheSameBits) {
  Engine first(ConfigOf(GetParam()));
  Engine second(ConfigOf(GetParam()));
  std::mt19937_64 random(900);
  std::vector<std::vector<int32_t>> stems;
  for (int i = 0; i < 3; ++i) stems.push_back(RandomTokens(random, 3 * ConfigOf(GetParam()).page_size));
  int continued = 0;
  for (int number = 0; number < 24; ++number) {
    Request request = RandomRequest(random, stems, number);
    request.sampling.seed = random();
    if (number % 4 == 0) request.sampling.min_tokens = request.sampling.max_tokens / 2;
    const Collected whole = RunOne(first, request);
    ASSERT_EQ(whole.error, "");
    if (whole.tokens.size() < 2) continue;
    const size_t cut = random() % (whole.tokens.size() - 1) + 1;
    request.generated.assign(whole.tokens.begin(), whole.tokens.begin() + static_cast<int64_t>(cut));
    const Collected rest = RunOne(second, request);
    ASSERT_EQ(rest.error, "");
    EXPECT_EQ(rest.tokens, std::vector<int32_t>(whole.tokens.begin() + static_cast<int64_t>(cut), whole.tokens.end()))
        << "request " << number << " from token " << cut;
    EXPECT_TRUE(Same(rest.logprobs, {whole.logprobs.begin() + static_cast<int64_t>(cut), whole.logprobs.end()}));
    EXPECT_EQ(rest.finish, whole.finish);
    EXPECT_EQ(rest.stop_token, whole.stop_token);
    EXPECT_TRUE(rest.prompt_logprobs.empty());
    ++continued;
  }
  EXPECT_GT(continued, 12);
}

INSTANTIATE_TEST_SUITE_P(Formats, ContinuedFormats, testing::ValuesIn(kCases), NameOf);

TEST(Continued, NothingFollowsATextThatHasEnded) {
  const TinyModel model;
  Engine engine(TinyConfig(model, "int4"));
  const auto error = [&](std::vector<int32_t> generated, int max_tokens, size_t prompt = 3) {
    return ErrorOf([&] {
      engine.Add({.id = "a",
                  .prompt = std::vector<int32_t>(prompt, 5),
                  .generated = std::move(generated),
                  .sampling = Greedy(max_tokens)});
    });
  };
  EXPECT_EQ(error({1, 2}, 2),
            "the request has 2 generated tokens: nothing can follow them, for max_tokens = 2 and max_model_len = 128");
  EXPECT_NE(error({1, 2}, 50, 126).find("nothing can follow"), std::string::npos);
  EXPECT_NE(error({1, 96}, 50).find("token 96 at position 1 of the generated tokens"), std::string::npos);
}

}  // namespace
}  // namespace kvanta::engine
