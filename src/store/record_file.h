// A record of a page as a file: one KV cache group's quantized or exact record, as the page pool holds it. Checked, and
// complete in itself: a reader trusts nothing but what it asked for.
//
//   0    8  magic "KVANTAPC"
//   8    4  version, 1
//   12   4  token ids
//   16   8  payload bytes
//   24   8  XXH3 (64 bits) of bytes 0..24 and of everything from byte 32 on
//   32  32  identity key (page_key.h)
//   64  32  page key
//   96   4  KV cache group
//   100  4  0: quantized record, 1: exact record
//   104  8  zeros
//   112     token ids of the page, int32
//   ...     payload, nothing after it
//
// All integers little endian.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cache/page_pool.h"
#include "store/page_key.h"

namespace kvanta::store {

// A record in a folder of one identity.
struct RecordId {
  PageKey key = {};
  int group = 0;
  cache::PageKind kind = cache::PageKind::kQuantized;

  bool operator==(const RecordId&) const = default;
};

// Keys are evenly distributed: some of their bits make a hash.
struct PageKeyHash {
  size_t operator()(const PageKey& key) const noexcept {
    uint64_t bits = 0;
    std::copy_n(key.begin(), sizeof bits, reinterpret_cast<uint8_t*>(&bits));
    return static_cast<size_t>(bits);
  }
};
struct RecordHash {
  size_t operator()(const RecordId& id) const noexcept {
    return PageKeyHash{}(id.key) ^ static_cast<size_t>(2 * id.group) ^ cache::KindIndex(id.kind);
  }
};

inline constexpr size_t kRecordHeaderBytes = 112;

// "<key>-0q": key in hexadecimal digits, group, q or x for the kind.
std::string FileName(const RecordId& id);
// False if `name` is not such a name.
bool ParseFileName(std::string_view name, RecordId& id);

// Header and token ids, to be followed by the payload.
std::vector<uint8_t> EncodeRecordHeader(const PageKey& identity, const RecordId& id, std::span<const int32_t> tokens,
                                        std::span<const uint8_t> payload);

struct RecordView {
  std::span<const uint8_t> tokens;  // bytes of the ids, unaligned
  std::span<const uint8_t> payload;
  std::string fault;  // why the file is not used; empty: it is whole, and the record that was asked for
};

RecordView ReadRecord(std::span<const uint8_t> file, const PageKey& identity, const RecordId& id);
// The same for a record whose page has these token ids, and whose payload has `payload_bytes`.
RecordView ReadRecord(std::span<const uint8_t> file, const PageKey& identity, const RecordId& id,
                      std::span<const int32_t> tokens, size_t payload_bytes);

}  // namespace kvanta::store
