// Files of records: keys, names, and that nothing but a whole file of the right record is accepted.
#include "store/record_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <random>
#include <set>
#include <thread>

namespace kvanta::store {
namespace {

constexpr cache::PageKind kExact = cache::PageKind::kExact;

TEST(PageKey, IsSha256) {
  EXPECT_EQ(Hex(IdentityKey("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  PageKey data;
  std::memcpy(data.data(), "what do ya want for nothing?....", data.size());
  EXPECT_EQ(RootKey(data, ""), data);
  // Python: hmac.digest(sha256(b"Jefe").digest(), b"what do ya want for nothing?....", "sha256")
  EXPECT_EQ(Hex(RootKey(data, "Jefe")), "f48f11a2d1a1c71174fdfa9627e6958ad34b327ae6e04ecb1f78a2e9c8abf8db");
}

// Keys of folders and servers that are in use. By Python's hashlib and hmac, tokens as struct.pack("<4i", ...).
TEST(PageKey, ChainsThroughSaltAndPages) {
  const PageKey root = RootKey(IdentityKey("model"), "tenant-7");
  EXPECT_EQ(Hex(root), "44ec580418c949566d0b93b0db3cc45ab852fed4750d1552262fe482c9078d3a");
  const PageKey first = ChildKey(root, std::vector<int32_t>{1, 2, 3, -4});
  EXPECT_EQ(Hex(first), "d679beeb42862e99ab5b9929a7bc85e85e3ae4bf4cd3d4afeb5c788e3f5f27b6");
  EXPECT_EQ(Hex(ChildKey(first, std::vector<int32_t>{2147483647})),
            "437dd6a089b5b4c92100dcf629b81525ff385ee2fa7adae931f10887a933b5aa");
}

TEST(PageKey, IsTheSameOnEveryThread) {
  const PageKey identity = IdentityKey("model");
  const std::vector<int32_t> tokens(64, 7);
  const PageKey expected = ChildKey(identity, tokens);
  std::array<int, 4> equal = {};
  {
    std::vector<std::jthread> threads;
    for (int& count : equal) {
      threads.emplace_back([&] {
        for (int i = 0; i < 1000; ++i) count += ChildKey(identity, tokens) == expected ? 1 : 0;
      });
    }
  }
  EXPECT_THAT(equal, testing::Each(1000));
}

TEST(PageKey, DistinguishesSaltsThatHmacPadsOrHashesToOneKey) {
  const PageKey identity = IdentityKey("model");
  EXPECT_NE(RootKey(identity, "a"), RootKey(identity, std::string("a\0", 2)));
  const std::string long_salt(65, 's');
  const PageKey digest = IdentityKey(long_salt);
  EXPECT_NE(RootKey(identity, long_salt), RootKey(identity, std::string(digest.begin(), digest.end())));
}

TEST(PageKey, DependsOnEveryTokenSaltAndOrder) {
  const PageKey identity = IdentityKey("model");
  const std::vector<int32_t> a = {1, 2};
  const std::vector<int32_t> b = {2, 1};
  std::set<PageKey> keys;
  for (const char* salt : {"", "a", "b", "ab"}) {
    const PageKey root = RootKey(identity, salt);
    keys.insert(root);
    for (const auto& first : {a, b}) {
      keys.insert(ChildKey(root, first));
      for (const auto& second : {a, b}) keys.insert(ChildKey(ChildKey(root, first), second));
    }
  }
  EXPECT_EQ(keys.size(), 4u * 7u);
}

TEST(RecordFile, NamesAreParsedBackAndNothingElse) {
  const RecordId id{IdentityKey("x"), 12, kExact};
  const std::string name = FileName(id);
  RecordId parsed;
  ASSERT_TRUE(ParseFileName(name, parsed));
  EXPECT_EQ(parsed, id);
  for (std::string bad : {name + "x", name.substr(1), "G" + name.substr(1), name.substr(0, 64) + "-012x", std::string(),
                          name.substr(0, 65) + "x", name.substr(0, name.size() - 1) + "y", "A" + name.substr(1)}) {
    EXPECT_FALSE(ParseFileName(bad, parsed)) << bad;
  }
}

class Written : public testing::Test {
 protected:
  Written() {
    std::mt19937 random(3);
    for (uint8_t& byte : payload_) byte = static_cast<uint8_t>(random());
    file_ = EncodeRecordHeader(identity_, id_, tokens_, payload_);
    file_.insert(file_.end(), payload_.begin(), payload_.end());
  }

  PageKey identity_ = IdentityKey("model");
  RecordId id_{ChildKey(identity_, std::vector<int32_t>{1, 2, 3}), 1, cache::PageKind::kQuantized};
  std::vector<int32_t> tokens_ = {1, 2, 3};
  std::vector<uint8_t> payload_ = std::vector<uint8_t>(300);
  std::vector<uint8_t> file_;
};

TEST_F(Written, IsReadBack) {
  const RecordView view = ReadRecord(file_, identity_, id_);
  EXPECT_EQ(view.fault, "");
  EXPECT_TRUE(std::ranges::equal(view.payload, payload_));
  ASSERT_EQ(view.tokens.size(), 12u);
  EXPECT_EQ(std::memcmp(view.tokens.data(), tokens_.data(), 12), 0);
}

TEST_F(Written, EveryBitAndEveryLengthCounts) {
  for (size_t bit = 0; bit < 8 * file_.size(); ++bit) {
    file_[bit / 8] ^= static_cast<uint8_t>(1U << (bit % 8));
    EXPECT_NE(ReadRecord(file_, identity_, id_).fault, "") << bit;
    file_[bit / 8] ^= static_cast<uint8_t>(1U << (bit % 8));
  }
  for (size_t length = 0; length < file_.size(); ++length) {
    EXPECT_NE(ReadRecord(std::span(file_).first(length), identity_, id_).fault, "") << length;
  }
  file_.push_back(0);
  EXPECT_NE(ReadRecord(file_, identity_, id_).fault, "");
}

TEST_F(Written, AnotherRecordIsRefused) {
  EXPECT_NE(ReadRecord(file_, IdentityKey("other"), id_).fault, "");
  for (const RecordId& other :
       {RecordId{identity_, 1, id_.kind}, RecordId{id_.key, 2, id_.kind}, RecordId{id_.key, 1, kExact}}) {
    EXPECT_NE(ReadRecord(file_, identity_, other).fault, "");
  }
}

}  // namespace
}  // namespace kvanta::store
