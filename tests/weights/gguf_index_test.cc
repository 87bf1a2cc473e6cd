#include "weights/gguf_index.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "base/memory_map.h"
#include "kvanta/error.h"
#include "weights/safetensors.h"
#include "weights/safetensors_bytes.h"
#include "weights/temp_folder.h"

namespace kvanta::weights {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// An index of one file of 1000 bytes.
std::string GgufIndexText(const std::string& tensors, const std::string& more = "") {
  return R"({"files":[{"path":"/m.gguf","size":1000,"mtime_ns":5}],"tensors":{)" + tensors + "}" + more + "}";
}

std::string GgufIndexError(const std::string& text) {
  try {
    ParseGgufIndex(text, "index");
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

TEST(GgufIndex, ReadsTensors) {
  const GgufIndex index =
      ParseGgufIndex(GgufIndexText(R"("q":{"file":0,"offset":96,"type":"Q8_0","shape":[4,64],"interleaved_heads":2},)"
                                   R"("n":{"offset":0,"type":"F32","shape":[3]})",
                                   R"(,"converted":"c.safetensors")"),
                     "index");
  EXPECT_EQ(index.files.at(0).path, "/m.gguf");
  EXPECT_EQ(index.files.at(0).mtime_ns, 5);
  EXPECT_EQ(index.converted, "c.safetensors");
  const GgufTensor& q = index.tensors.at("q");
  EXPECT_EQ(q.offset, 96U);
  EXPECT_EQ(q.bytes, 4U * 2 * 34);
  EXPECT_EQ(q.interleaved_heads, 2);
  EXPECT_THAT(q.shape, ElementsAre(4, 64));
  EXPECT_EQ(index.tensors.at("n").bytes, 12U);
}

TEST(GgufIndex, StarsAreTheFirstSize) {
  const GgufIndex index =
      ParseGgufIndex(GgufIndexText(R"("e.*.w":{"offset":8,"type":"Q4_0","shape":[3,2,32]})"), "index");
  ASSERT_EQ(index.tensors.size(), 3U);
  EXPECT_EQ(index.tensors.at("e.2.w").offset, 8U + 2 * 36);
  EXPECT_EQ(index.tensors.at("e.2.w").bytes, 36U);
  EXPECT_THAT(index.tensors.at("e.2.w").shape, ElementsAre(2, 32));
}

TEST(GgufIndex, AStrideLeavesOutWhatIsBetween) {
  const GgufIndex index =
      ParseGgufIndex(GgufIndexText(R"("up.*.w":{"offset":44,"type":"Q4_0","shape":[3,2,32],"stride":72})"), "index");
  ASSERT_EQ(index.tensors.size(), 3U);
  EXPECT_EQ(index.tensors.at("up.0.w").offset, 44U);
  EXPECT_EQ(index.tensors.at("up.2.w").offset, 44U + 2 * 72);
  EXPECT_EQ(index.tensors.at("up.2.w").bytes, 36U);
  const auto error = [](int stride) {
    return GgufIndexError(
        GgufIndexText(fmt::format(R"("t.*":{{"offset":100,"type":"F32","shape":[3,25],"stride":{}}})", stride)));
  };
  EXPECT_EQ(error(400), "no error");
  EXPECT_THAT(error(401),
              HasSubstr("'tensors.t.*.stride' is 401: 3 tensors at this distance end beyond the 1000 bytes"));
  EXPECT_THAT(error(99), HasSubstr("stride"));
}

TEST(GgufIndex, RefusesWhatDoesNotFit) {
  const auto tensor = [](const std::string& entry) { return GgufIndexError(GgufIndexText("\"t\":{" + entry + "}")); };
  EXPECT_THAT(GgufIndexError("{}"), HasSubstr("files"));
  EXPECT_THAT(GgufIndexError(R"({"files":[],"tensors":{}})"), HasSubstr("a list of GGUF files"));
  EXPECT_THAT(tensor(R"("offset":0,"type":"Q9","shape":[32])"), HasSubstr("one of F32, F16, BF16, Q8_0"));
  EXPECT_THAT(tensor(R"("offset":0,"type":"Q8_0","shape":[2,33])"), HasSubstr("whole blocks"));
  EXPECT_THAT(tensor(R"("offset":0,"type":"F32","shape":[])"), HasSubstr("positive sizes"));
  EXPECT_THAT(tensor(R"("offset":0,"type":"F32","shape":[0])"), HasSubstr("positive sizes"));
  EXPECT_THAT(tensor(R"("offset":0,"type":"F32","shape":[1099511627776,1099511627776,1099511627776])"),
              HasSubstr("more bytes than any file has"));
  EXPECT_THAT(tensor(R"("offset":989,"type":"F32","shape":[3])"), HasSubstr("end beyond the 1000 bytes of /m.gguf"));
  EXPECT_EQ(tensor(R"("offset":988,"type":"F32","shape":[3])"), "no error");
  EXPECT_THAT(tensor(R"("offset":-1,"type":"F32","shape":[3])"), HasSubstr("offset"));
  EXPECT_THAT(tensor(R"("file":1,"offset":0,"type":"F32","shape":[3])"), HasSubstr("file"));
  EXPECT_THAT(tensor(R"("offset":0,"type":"F32","shape":[6,1],"interleaved_heads":2)"),
              HasSubstr("even size in 6 rows"));
  EXPECT_THAT(GgufIndexError(GgufIndexText(R"("t.*":{"offset":0,"type":"F32","shape":[4]})")),
              HasSubstr("the shape of each"));
  EXPECT_THAT(GgufIndexError(GgufIndexText(
                  R"("t.*":{"offset":0,"type":"F32","shape":[2,1]},"t.1":{"offset":0,"type":"F32","shape":[1]})")),
              HasSubstr("'t.1' is there twice"));
}

TEST(GgufIndex, TooManyTensorsAreRefusedAtOnce) {
  EXPECT_THAT(GgufIndexError(R"({"files":[{"path":"/m","size":1000000000000,"mtime_ns":5}],)"
                             R"("tensors":{"t.*":{"offset":0,"type":"F32","shape":[100000000000,1]}}})"),
              HasSubstr("at most"));
}

class GgufCheckpoint : public testing::Test {
 protected:
  // Writes the file, and an index that says `size` and, added to the file's time, `later`.
  void Write(const std::string& file, size_t size, int64_t later = 0, const std::string& more = "") {
    folder_.Write("m.gguf", file);
    const std::string path = folder_.Path() + "/m.gguf";
    const int64_t mtime = MemoryMap(path).ModifiedNs() + later;
    folder_.Write(kGgufIndexFile,
                  fmt::format(R"({{"files":[{{"path":"{}","size":{},"mtime_ns":{}}}],"tensors":)"
                              R"({{"a":{{"offset":4,"type":"BF16","shape":[1,2],"interleaved_heads":0}}}}{}}})",
                              path, size, mtime, more));
  }
  std::string OpenError() {
    try {
      Checkpoint::Open(folder_.Path());
    } catch (const InputError& error) {
      return error.what();
    }
    return "no error";
  }

  TempFolder folder_;
};

TEST_F(GgufCheckpoint, MapsTheFile) {
  SafetensorsWriter converted;
  converted.Add("b", {1}, {2.5F});
  folder_.Write("c.safetensors", converted.File());
  Write("GGUFabcd", 8, 0, R"(,"converted":"c.safetensors")");
  ASSERT_TRUE(Checkpoint::Exists(folder_.Path()));
  const Checkpoint checkpoint = Checkpoint::Open(folder_.Path());
  EXPECT_TRUE(checkpoint.IsGguf());
  EXPECT_THAT(checkpoint.Name(), testing::EndsWith("/m.gguf"));
  EXPECT_THAT(checkpoint.Get("a").data, ElementsAre('a', 'b', 'c', 'd'));
  EXPECT_EQ(checkpoint.Get("b").dtype, "F32");
  checkpoint.Release(checkpoint.Get("a"));
  EXPECT_THAT(checkpoint.Get("a").data, ElementsAre('a', 'b', 'c', 'd'));  // read again
}

TEST_F(GgufCheckpoint, RefusesAnotherFile) {
  Write("GGUFabcd", 9);
  EXPECT_THAT(OpenError(), HasSubstr("m.gguf: changed since"));
  Write("GGUFabcd", 8, 1);
  EXPECT_THAT(OpenError(), HasSubstr("m.gguf: changed since"));
  Write("GGUFabcd", 8, 0, R"(,"converted":"../c.safetensors")");
  EXPECT_THAT(OpenError(), HasSubstr("in the same folder"));
  std::filesystem::remove(folder_.Path() + "/m.gguf");
  EXPECT_THAT(OpenError(), HasSubstr("m.gguf: cannot open"));
}

// An index from elsewhere may name any file of this machine.
TEST_F(GgufCheckpoint, RefusesAFileThatIsNotGguf) {
  Write("root:x:0", 8);
  EXPECT_THAT(OpenError(), HasSubstr("m.gguf: no GGUF file"));
}

}  // namespace
}  // namespace kvanta::weights
