// Selection of the ISA unit: by name, by KVANTA_ISA, and the error that lists the units.
#include "kernels/cpu/select.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "isa_environment.h"
#include "kernels/cpu/built_units.h"
#include "kernels/ops.h"
#include "kvanta/error.h"

namespace kvanta::kernels {
namespace {

std::string ErrorOf(const char* isa) {
  try {
    SelectIsa(isa);
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

TEST(SelectIsa, EveryRunnableUnitByName) {
  ASSERT_FALSE(RunnableIsas().empty());
  if (IsBuilt("portable")) {
    EXPECT_STREQ(RunnableIsas().back(), "portable");
  }
  for (const char* isa : RunnableIsas()) EXPECT_STREQ(SelectIsa(isa).name, isa);
}

TEST(SelectIsa, AutoIsTheBestUnlessTheEnvironmentSaysOtherwise) {
  {
    const IsaEnvironment none(nullptr);
    EXPECT_STREQ(SelectIsa("auto").name, RunnableIsas().front());
  }
  {
    const IsaEnvironment automatic("auto");
    EXPECT_STREQ(SelectedIsa("auto"), RunnableIsas().front());
  }
  const IsaEnvironment last(RunnableIsas().back());
  EXPECT_STREQ(SelectIsa("auto").name, RunnableIsas().back());
  EXPECT_STREQ(SelectIsa(RunnableIsas().front()).name, RunnableIsas().front());  // a name overrides the environment
}

TEST(SelectIsa, AnUnknownUnitIsAnErrorThatListsTheUnits) {
  EXPECT_THAT(ErrorOf("sse9"),
              ::testing::AllOf(::testing::HasSubstr("isa is 'sse9'"), ::testing::HasSubstr(RunnableIsas().back())));
  const IsaEnvironment wrong("altivec");
  EXPECT_THAT(ErrorOf("auto"), ::testing::HasSubstr("KVANTA_ISA is 'altivec'"));
}

}  // namespace
}  // namespace kvanta::kernels
