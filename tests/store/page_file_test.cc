// Page files: keys, names, and that nothing but a whole file of the right record is accepted.
#include "store/page_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <array>
#include <cstring>
#include <random>
#include <set>
#include <thread>

#include "formats/bytes.h"

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

TEST(PageFile, NamesAreParsedBackAndNothingElse) {
  const RecordId id{IdentityKey("x"), 12, kExact};
  const std::string name = FileName(id);
  RecordId parsed;
  ASSERT_TRUE(ParseFileName(name, parsed));
  EXPECT_EQ(parsed, id);
  for (const cache::PageKind kind : cache::kPageKinds) {
    const RecordId each{IdentityKey("x"), 3, kind};
    ASSERT_TRUE(ParseFileName(FileName(each), parsed));
    EXPECT_EQ(parsed, each);
  }
  for (std::string bad : {name + "x", name.substr(1), "G" + name.substr(1), name.substr(0, 64) + "-012x", std::string(),
                          name.substr(0, 65) + "x", name.substr(0, name.size() - 1) + "y", "A" + name.substr(1)}) {
    EXPECT_FALSE(ParseFileName(bad, parsed)) << bad;
  }
}

// By whether the file has the identity's text: version 2, else version 1.
class Written : public testing::TestWithParam<bool> {
 protected:
  Written() {
    std::mt19937 random(3);
    for (uint8_t& byte : payload_) byte = static_cast<uint8_t>(random());
    file_ = Encode();
  }

  std::vector<uint8_t> Encode() const {
    std::vector<uint8_t> file = EncodePageHeader(identity_, id_, tokens_, payload_, GetParam() ? "model" : "");
    file.insert(file.end(), payload_.begin(), payload_.end());
    return file;
  }
  // Gives the file the checksum of what it says, as a hostile writer would.
  void Seal() {
    std::vector<uint8_t> summed(file_.begin(), file_.begin() + 24);
    summed.insert(summed.end(), file_.begin() + 32, file_.end());
    formats::StoreBytes(file_.data() + 24, uint64_t{XXH3_64bits(summed.data(), summed.size())});
  }

  PageKey identity_ = IdentityKey("model");
  RecordId id_{ChildKey(identity_, std::vector<int32_t>{1, 2, 3}), 1, cache::PageKind::kQuantized};
  std::vector<int32_t> tokens_ = {1, 2, 3};
  std::vector<uint8_t> payload_ = std::vector<uint8_t>(300);
  std::vector<uint8_t> file_;
};

TEST_P(Written, IsReadBack) {
  const PageFile view = ReadRecord(file_, identity_, id_);
  EXPECT_EQ(view.fault, "");
  EXPECT_TRUE(std::ranges::equal(view.payload, payload_));
  ASSERT_EQ(view.tokens.size(), 12u);
  EXPECT_EQ(std::memcmp(view.tokens.data(), tokens_.data(), 12), 0);
  EXPECT_EQ(view.version, GetParam() ? 2U : 1U);
  EXPECT_EQ(view.identity_text, GetParam() ? "model" : "");
  EXPECT_EQ(view.identity, identity_);
  EXPECT_EQ(view.id, id_);
}

// The bytes that folders and servers hold: a change of these needs another version.
TEST(PageFile, VersionOneIsTheSameForEver) {
  const std::vector<uint8_t> payload = {1, 2, 3, 4, 5};
  const std::vector<int32_t> tokens = {1, -2};
  const PageKey identity = IdentityKey("model");
  const std::vector<uint8_t> head =
      EncodePageHeader(identity, {ChildKey(identity, tokens), 3, kExact}, tokens, payload);
  EXPECT_EQ(Hex(head),
            "4b56414e5441504301000000020000000500000000000000171617f65267c72e9372c470eeadd5ecd9c3c74c2b3cb633"
            "f8e2f2fad799250a0f70d652b6b825e448fc6c0aa1a597d48b5c50488a30f8bb87c7cd552ba7d4b2936fc782f8202fa0"
            "0300000001000000000000000000000001000000feffffff");
}

TEST_P(Written, HostileFilesAreRefusedWithTheReason) {
  const auto good = file_;
  for (const size_t at : {size_t{12}, size_t{16}, size_t{104}}) {
    if (at == 104 && !GetParam()) continue;  // not read
    for (const uint32_t length : {0U, 2U, 299U, 0x7fffffffU, 0xffffffffU}) {
      file_ = good;
      formats::StoreBytes(file_.data() + at, length);
      Seal();
      EXPECT_NE(ReadPageFile(file_).fault, "") << at << ", " << length;
    }
  }
  for (const uint64_t length : {~uint64_t{0}, ~uint64_t{0} - 111, uint64_t{1} << 63U}) {
    file_ = good;
    formats::StoreBytes(file_.data() + 16, length);
    Seal();
    EXPECT_THAT(ReadPageFile(file_).fault, testing::HasSubstr("do not make a file"));
  }
  const auto refusal = [&](size_t at, uint32_t value) {
    file_ = good;
    formats::StoreBytes(file_.data() + at, value);
    Seal();
    return ReadPageFile(file_).fault;
  };
  EXPECT_THAT(refusal(8, 3), testing::HasSubstr("version 3 is not 1 or 2"));
  EXPECT_THAT(refusal(8, 0), testing::HasSubstr("version 0"));
  EXPECT_THAT(refusal(96, 0x80000000U), testing::HasSubstr("group"));
  EXPECT_THAT(refusal(100, 4), testing::HasSubstr("kind 4"));
  EXPECT_EQ(refusal(32, 7) == "", !GetParam()) << "an identity's text has one key";
  file_ = good;
  std::copy_n("KVANTAPG", 8, file_.begin());
  EXPECT_THAT(ReadPageFile(file_).fault, testing::HasSubstr("KVANTAPG"));
}

TEST_P(Written, EveryBitAndEveryLengthCounts) {
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

TEST_P(Written, AnotherRecordIsRefused) {
  EXPECT_NE(ReadRecord(file_, IdentityKey("other"), id_).fault, "");
  for (const RecordId& other :
       {RecordId{identity_, 1, id_.kind}, RecordId{id_.key, 2, id_.kind}, RecordId{id_.key, 1, kExact}}) {
    EXPECT_NE(ReadRecord(file_, identity_, other).fault, "");
  }
}

INSTANTIATE_TEST_SUITE_P(Versions, Written, testing::Bool());

}  // namespace
}  // namespace kvanta::store
