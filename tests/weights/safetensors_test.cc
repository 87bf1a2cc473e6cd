#include "weights/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvanta/error.h"
#include "weights/safetensors_bytes.h"
#include "weights/temp_folder.h"

namespace kvanta::weights {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TensorMap Parse(const std::string& file) {
  return ParseSafetensors({reinterpret_cast<const uint8_t*>(file.data()), file.size()}, "f");
}

std::string ErrorOf(const std::string& file) {
  try {
    Parse(file);
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

std::string Entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return "{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
}

TEST(Safetensors, ReadsTensorsWithMetadataAndPadding) {
  const std::string file = SafetensorsFile(
      "{\"__metadata__\":{\"format\":\"pt\"},\"b\":" + Entry("BF16", "[2,1]", "[4,8]") +
          ",\"a\":" + Entry("F32", "[]", "[0,4]") + ",\"none\":" + Entry("I64", "[3,0]", "[8,8]") + "}   ",
      "abcdefgh");
  const TensorMap tensors = Parse(file);
  ASSERT_EQ(tensors.size(), 3U);
  EXPECT_EQ(tensors.at("b").dtype, "BF16");
  EXPECT_THAT(tensors.at("b").shape, ElementsAre(2, 1));
  EXPECT_THAT(tensors.at("b").data, ElementsAre('e', 'f', 'g', 'h'));
  EXPECT_TRUE(tensors.at("a").shape.empty());
  EXPECT_TRUE(tensors.at("none").data.empty());
}

TEST(Safetensors, FourBitElementsTakeHalfBytes) {
  EXPECT_EQ(Parse(SafetensorsFile("{\"a\":" + Entry("F4", "[4]", "[0,2]") + "}", "xy")).size(), 1U);
  EXPECT_THAT(ErrorOf(SafetensorsFile("{\"a\":" + Entry("F4", "[3]", "[0,2]") + "}", "xy")),
              HasSubstr("not whole bytes"));
}

// Every way to lie that we know of: the file, and what the message must say.
struct Hostile {
  const char* name;
  std::string file;
  const char* message;
};

class HostileSafetensors : public testing::TestWithParam<Hostile> {};

TEST_P(HostileSafetensors, IsRefusedWithTheReason) {
  EXPECT_THAT(ErrorOf(GetParam().file), HasSubstr(GetParam().message));
  EXPECT_THAT(ErrorOf(GetParam().file), testing::Not(HasSubstr("\n")));
}

std::string One(const std::string& dtype, const std::string& shape, const std::string& offsets, const char* data) {
  return SafetensorsFile("{\"a\":" + Entry(dtype, shape, offsets) + "}", data);
}

INSTANTIATE_TEST_SUITE_P(
    All, HostileSafetensors,
    testing::ValuesIn(std::vector<Hostile>{
        {"Empty", "", "truncated: 0 bytes"},
        {"GitLfsPointer", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "run git lfs pull"},
        {"SevenBytes", "\1\0\0\0", "truncated"},
        {"HeaderLongerThanFile", std::string("\x10\0\0\0\0\0\0\0{}", 10), "truncated: a header of 16"},
        {"HeaderTooLong", std::string("\x01\xe1\xf5\x05\0\0\0\0{}", 10), "at most 100000000"},
        {"HeaderLengthAllOnes", std::string(8, '\xff') + "{}", "not a safetensors file"},
        {"NotAnObject", SafetensorsFile("[1]"), "does not start with '{'"},
        {"NotJson", SafetensorsFile("{\"a\":"), "not valid JSON"},
        {"TextAfterHeader", SafetensorsFile("{}x"), "not valid JSON"},
        {"InvalidUtf8", SafetensorsFile("{\"\xff\xfe\":1}"), "not valid JSON"},
        {"DuplicateTensor",
         SafetensorsFile("{\"a\":" + Entry("U8", "[1]", "[0,1]") + ",\"a\":" + Entry("U8", "[1]", "[1,2]") + "}", "xy"),
         "'a' appears twice"},
        {"DuplicateKeyInTensor", SafetensorsFile("{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\"}}"), "appears twice"},
        {"TooDeep", SafetensorsFile("{\"a\":" + std::string(100, '[') + std::string(100, ']') + "}"), "nested deeper"},
        {"TensorIsNumber", SafetensorsFile("{\"a\":1}"), "expected an object"},
        {"NoDtype", SafetensorsFile("{\"a\":{\"shape\":[1],\"data_offsets\":[0,1]}}", "x"), "'a.dtype' is missing"},
        {"UnknownDtype", One("F12", "[1]", "[0,1]", "x"), "'F12'; expected one of BOOL"},
        {"NegativeSize", One("U8", "[-1]", "[0,1]", "x"), "expected a list of sizes"},
        {"FractionalSize", One("U8", "[1.0]", "[0,1]", "x"), "expected a list of sizes"},
        {"HugeSize", One("U8", "[18446744073709551615]", "[0,1]", "x"), "expected a list of sizes"},
        {"ProductOverflows", One("U8", "[4294967296,4294967296]", "[0,0]", ""), "more bits than"},
        {"ProductWrapsToZero", One("F32", "[2305843009213693952,4]", "[0,0]", ""), "more bits than"},
        {"OneOffset", One("U8", "[1]", "[0]", "x"), "[begin, end]"},
        {"NegativeOffset", One("U8", "[1]", "[-1,0]", "x"), "[begin, end]"},
        {"BackwardOffsets", One("U8", "[1]", "[1,0]", "x"), "outside of the 1 bytes"},
        {"OffsetBeyondData", One("U8", "[2]", "[0,2]", "x"), "truncated or lies"},
        {"OffsetHuge", One("U8", "[1]", "[0,18446744073709551615]", "x"), "truncated or lies"},
        {"WrongByteCount", One("F32", "[1]", "[0,2]", "xy"), "takes 4 bytes, its data_offsets hold 2"},
        {"Overlap",
         SafetensorsFile("{\"a\":" + Entry("U8", "[2]", "[0,2]") + ",\"b\":" + Entry("U8", "[2]", "[1,3]") + "}",
                         "xyz"),
         "inside another tensor"},
        {"Same",
         SafetensorsFile("{\"a\":" + Entry("U8", "[2]", "[0,2]") + ",\"b\":" + Entry("U8", "[2]", "[0,2]") + "}", "xy"),
         "inside another tensor"},
        {"Hole",
         SafetensorsFile("{\"a\":" + Entry("U8", "[1]", "[0,1]") + ",\"b\":" + Entry("U8", "[1]", "[2,3]") + "}",
                         "xyz"),
         "after a hole"},
        {"DataLeftOver", One("U8", "[1]", "[0,1]", "xy"), "2 bytes of data, but its tensors end at 1"},
        {"MetadataIsNotText", SafetensorsFile("{\"__metadata__\":{\"a\":1}}"), "'__metadata__.a' is 1"},
        {"NewlineInName", SafetensorsFile("{\"a\\nb\":1}"), "a\\x0ab"},
    }),
    [](const auto& hostile) { return hostile.param.name; });

TEST(ShardIndex, RefusesNamesThatLeaveTheFolder) {
  for (const char* name : {"../a.safetensors", "/etc/a.safetensors", "x/../../a.safetensors", "sub/a.safetensors",
                           "..\\\\a.safetensors", ".a.safetensors", "a.bin", "", "a.safetensors\\u0000.safetensors"}) {
    const std::string text = std::string("{\"weight_map\":{\"w\":\"") + name + "\"}}";
    EXPECT_THROW(ParseShardIndex(text, "i"), InputError) << name;
  }
  EXPECT_THROW(ParseShardIndex("{}", "i"), InputError);
  EXPECT_THROW(ParseShardIndex("{\"weight_map\":{}}", "i"), InputError);
  EXPECT_THROW(ParseShardIndex("{\"weight_map\":{\"w\":1}}", "i"), InputError);
  EXPECT_EQ(ParseShardIndex("{\"weight_map\":{\"w\":\"a-1.safetensors\"}}", "i").at("w"), "a-1.safetensors");
}

class ShardedCheckpoint : public testing::Test {
 protected:
  void SetUp() override {
    SafetensorsWriter one, two;
    one.Add("a", {1}, {1.0F});
    two.Add("b", {2}, {2.0F, 3.0F});
    folder_.Write("1.safetensors", one.File());
    folder_.Write("2.safetensors", two.File());
  }
  std::string OpenError(const std::string& index) {
    folder_.Write("model.safetensors.index.json", index);
    try {
      Checkpoint::Open(folder_.Path());
    } catch (const InputError& error) {
      return error.what();
    }
    return "no error";
  }
  TempFolder folder_;
};

TEST_F(ShardedCheckpoint, ReadsAllShards) {
  folder_.Write("model.safetensors.index.json",
                R"({"metadata":{},"weight_map":{"a":"1.safetensors","b":"2.safetensors"}})");
  const Checkpoint checkpoint = Checkpoint::Open(folder_.Path());
  EXPECT_THAT(checkpoint.Names(), ElementsAre("a", "b"));
  EXPECT_EQ(checkpoint.TotalBytes(), 12);
  EXPECT_EQ(checkpoint.Get("b").data.size(), 8U);
  EXPECT_EQ(checkpoint.Find("c"), nullptr);
}

TEST_F(ShardedCheckpoint, TheIndexMustTellTheTruth) {
  EXPECT_THAT(OpenError(R"({"weight_map":{"a":"2.safetensors","b":"1.safetensors"}})"), HasSubstr("as the index says"));
  EXPECT_THAT(OpenError(R"({"weight_map":{"a":"1.safetensors","c":"1.safetensors"}})"), HasSubstr("in no shard"));
  EXPECT_THAT(OpenError(R"({"weight_map":{"a":"1.safetensors","b":"3.safetensors"}})"), HasSubstr("cannot open"));
}

TEST_F(ShardedCheckpoint, NoTensorTwice) {
  SafetensorsWriter again;
  again.Add("a", {1}, {1.0F});
  folder_.Write("2.safetensors", again.File());
  EXPECT_THAT(OpenError(R"({"weight_map":{"a":"1.safetensors","b":"2.safetensors"}})"), HasSubstr("another shard"));
}

TEST(Checkpoint, NamesWhatIsMissing) {
  const TempFolder folder;
  EXPECT_THROW(Checkpoint::Open(folder.Path()), InputError);
  SafetensorsWriter writer;
  writer.Add("model.layers.0.mlp.up_proj.weight", {1}, {1.0F});
  folder.Write("model.safetensors", writer.File());
  try {
    Checkpoint::Open(folder.Path()).Get("model.layers.0.mlp.up_proj.weights");
    FAIL();
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), HasSubstr("nearest names are model.layers.0.mlp.up_proj.weight"));
  }
}

TEST(Checkpoint, RefusesWhatIsNoFile) {
  const TempFolder folder;
  std::filesystem::create_directory(folder.Path() + "/model.safetensors");
  EXPECT_THROW(Checkpoint::Open(folder.Path()), InputError);
}

}  // namespace
}  // namespace kvanta::weights
