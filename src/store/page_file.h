// Pages in files: their keys, names and format. A file has one KV cache group's quantized or exact record of a page, as
// the page pool holds it (docs/formats.md, "Cells"), is checked, and is complete in itself: a reader trusts nothing but
// what it asked for.
//
//   0    8  magic "KVANTAPC"
//   8    4  version: 1, or 2 with the identity's text
//   12   4  token ids
//   16   8  payload bytes
//   24   8  XXH3 (64 bits) of bytes 0..24 and of everything from byte 32 on
//   32  32  identity key
//   64  32  page key
//   96   4  KV cache group
//   100  4  0: quantized record, 1: exact record, 2 and 3: records of later levels (cache/page_kind.h)
//   104  4  bytes of the identity's text; version 1: 0, the folder's identity.json has it
//   108  4  zeros
//   112     token ids of the page, int32
//   ...     the identity's text: JSON of all that the payload depends on besides its token ids
//   ...     payload, nothing after it
//
// All integers little endian. Folders and servers hold version 1; Engine::ExportPage writes version 2.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cache/page_pool.h"
#include "cache/record_listener.h"

namespace kvanta::store {

using cache::PageKey;

// ---- keys: SHA-256, chained from an identity over the token ids of all pages from the first on. A salt's SHA-256 keys
// the chain (HMAC), so that pages of one salt are never found with another. The functions throw std::bad_alloc where
// OpenSSL gets no memory.

// identity: text of all that the bytes of a page depend on besides its token ids.
PageKey IdentityKey(std::string_view identity);
// Name of an identity among others in one place: the first hexadecimal digits of its key.
inline constexpr size_t kIdentityDigits = 32;
std::string IdentityName(const PageKey& identity);
// Key of the empty prefix.
PageKey RootKey(const PageKey& identity, std::string_view salt);
PageKey ChildKey(const PageKey& parent, std::span<const int32_t> tokens);

std::string Hex(std::span<const uint8_t> bytes);

// ---- names

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
    return PageKeyHash{}(id.key) ^ cache::RecordIndex(id.group, id.kind);
  }
};

// "<key>-0q": key in hexadecimal digits, group, q, x, a or b for the kind.
std::string FileName(const RecordId& id);
// False if `name` is not such a name.
bool ParseFileName(std::string_view name, RecordId& id);

// ---- files

inline constexpr size_t kPageHeaderBytes = 112;

// All that precedes the payload. identity_text: makes the file describe itself; empty: version 1.
std::vector<uint8_t> EncodePageHeader(const PageKey& identity, const RecordId& id, std::span<const int32_t> tokens,
                                      std::span<const uint8_t> payload, std::string_view identity_text = {});

struct PageFile {
  uint32_t version = 0;
  uint64_t checksum = 0;
  PageKey identity = {};
  RecordId id = {};
  std::span<const uint8_t> tokens;  // bytes of the ids, unaligned
  std::string_view identity_text;   // empty in version 1
  std::span<const uint8_t> payload;
  std::string fault;  // why the file is not used; empty: it is whole, and what was asked for
};

// A page file of any identity.
PageFile ReadPageFile(std::span<const uint8_t> file);
// The record `id` of this identity.
PageFile ReadRecord(std::span<const uint8_t> file, const PageKey& identity, const RecordId& id);
// The same for a record whose page has these token ids, and whose payload has `payload_bytes`.
PageFile ReadRecord(std::span<const uint8_t> file, const PageKey& identity, const RecordId& id,
                    std::span<const int32_t> tokens, size_t payload_bytes);

}  // namespace kvanta::store
