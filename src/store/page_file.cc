#include "store/page_file.h"

#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <new>

#include "formats/bytes.h"

namespace kvanta::store {
namespace {

static_assert(std::endian::native == std::endian::little, "token ids are hashed as little endian integers");

using Bytes = std::span<const uint8_t>;

Bytes BytesOf(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// The thread's context: no hash but the first allocates memory.
EVP_MD_CTX* Context() {
  // A thread that hangs in the system is left behind and may hash while the process exits, after OpenSSL's cleanup.
  static const int initialized = OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);
  thread_local std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(nullptr, &EVP_MD_CTX_free);
  if (context == nullptr && initialized == 1) context.reset(EVP_MD_CTX_new());
  if (context == nullptr) throw std::bad_alloc();
  return context.get();
}

PageKey Sha256(std::initializer_list<Bytes> parts) {
  PageKey key;
  EVP_MD_CTX* const context = Context();
  bool hashed =
      EVP_MD_get_size(EVP_sha256()) == std::ssize(key) && EVP_DigestInit_ex(context, EVP_sha256(), nullptr) == 1;
  for (const Bytes part : parts) hashed = hashed && EVP_DigestUpdate(context, part.data(), part.size()) == 1;
  if (!hashed || EVP_DigestFinal_ex(context, key.data(), nullptr) != 1) throw std::bad_alloc();
  return key;
}

using formats::LoadBytes;
using formats::StoreBytes;

constexpr std::string_view kMagic = "KVANTAPC";
constexpr size_t kChecksumAt = 24;
constexpr size_t kIdentityAt = 32;
constexpr size_t kKeyAt = 64;
constexpr size_t kGroupAt = 96;
constexpr size_t kKindAt = 100;
constexpr size_t kTextBytesAt = 104;
constexpr uint32_t kMaxGroup = 4095;

// XXH3 of a file but for its own bytes; `head` ends where `payload` begins.
uint64_t Checksum(std::span<const uint8_t> head, std::span<const uint8_t> payload) {
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(), &XXH3_freeState);
  if (state == nullptr) throw std::bad_alloc();
  XXH3_64bits_reset(state.get());
  XXH3_64bits_update(state.get(), head.data(), kChecksumAt);
  XXH3_64bits_update(state.get(), head.data() + kIdentityAt, head.size() - kIdentityAt);
  XXH3_64bits_update(state.get(), payload.data(), payload.size());
  return XXH3_64bits_digest(state.get());
}

constexpr std::string_view kKindLetters = "qxab";  // by cache::KindIndex
static_assert(kKindLetters.size() == std::size(cache::kPageKinds));

}  // namespace

PageKey IdentityKey(std::string_view identity) {
  return Sha256({BytesOf(identity)});
}

PageKey RootKey(const PageKey& identity, std::string_view salt) {
  if (salt.empty()) return identity;
  // HMAC pads its key with zeros and hashes a long one: as keys, "a" and "a\0" would be the same salt.
  const PageKey salt_key = Sha256({BytesOf(salt)});
  PageKey key;
  if (HMAC(EVP_sha256(), salt_key.data(), static_cast<int>(salt_key.size()), identity.data(), identity.size(),
           key.data(), nullptr) == nullptr) {
    throw std::bad_alloc();
  }
  return key;
}

PageKey ChildKey(const PageKey& parent, std::span<const int32_t> tokens) {
  return Sha256({parent, {reinterpret_cast<const uint8_t*>(tokens.data()), tokens.size_bytes()}});
}

std::string Hex(std::span<const uint8_t> bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  text.reserve(2 * bytes.size());
  for (const uint8_t byte : bytes) {
    text.push_back(kDigits[byte >> 4U]);
    text.push_back(kDigits[byte & 15U]);
  }
  return text;
}

std::string IdentityName(const PageKey& identity) {
  return Hex(identity).substr(0, kIdentityDigits);
}

std::string FileName(const RecordId& id) {
  return fmt::format("{}-{}{}", Hex(id.key), id.group, kKindLetters[cache::KindIndex(id.kind)]);
}

bool ParseFileName(std::string_view name, RecordId& id) {
  const size_t digits = 2 * id.key.size();
  if (name.size() < digits + 3 || name[digits] != '-') return false;
  for (size_t i = 0; i < id.key.size(); ++i) {
    const char* at = name.data() + 2 * i;
    const auto [end, error] = std::from_chars(at, at + 2, id.key[i], 16);
    if (error != std::errc() || end != at + 2) return false;
  }
  const char* last = name.data() + name.size() - 1;
  const auto [end, error] = std::from_chars(name.data() + digits + 1, last, id.group);
  const size_t kind = kKindLetters.find(*last);
  if (error != std::errc() || end != last || kind == std::string_view::npos) return false;
  id.kind = cache::kPageKinds[kind];
  return name == FileName(id);  // one spelling only
}

std::vector<uint8_t> EncodePageHeader(const PageKey& identity, const RecordId& id, std::span<const int32_t> tokens,
                                      std::span<const uint8_t> payload, std::string_view identity_text) {
  std::vector<uint8_t> head(kPageHeaderBytes + tokens.size_bytes());
  std::copy(kMagic.begin(), kMagic.end(), head.begin());
  StoreBytes(head.data() + 8, identity_text.empty() ? uint32_t{1} : uint32_t{2});
  StoreBytes(head.data() + 12, static_cast<uint32_t>(tokens.size()));
  StoreBytes(head.data() + 16, uint64_t{payload.size()});
  std::ranges::copy(identity, head.begin() + kIdentityAt);
  std::ranges::copy(id.key, head.begin() + kKeyAt);
  StoreBytes(head.data() + kGroupAt, static_cast<uint32_t>(id.group));
  StoreBytes(head.data() + kKindAt, static_cast<uint32_t>(cache::KindIndex(id.kind)));
  StoreBytes(head.data() + kTextBytesAt, static_cast<uint32_t>(identity_text.size()));
  if (!tokens.empty()) std::memcpy(head.data() + kPageHeaderBytes, tokens.data(), tokens.size_bytes());
  head.insert(head.end(), identity_text.begin(), identity_text.end());
  StoreBytes(head.data() + kChecksumAt, Checksum(head, payload));
  return head;
}

PageFile ReadPageFile(std::span<const uint8_t> file) {
  PageFile page;
  const auto refuse = [&page](std::string fault) {
    page.fault = std::move(fault);
    return page;
  };
  const auto begins_with = [&](std::string_view magic) {
    return std::equal(magic.begin(), magic.end(), file.begin(), file.begin() + std::ssize(magic));
  };
  if (file.size() < kPageHeaderBytes) return refuse(fmt::format("{} bytes are too few", file.size()));
  if (begins_with("KVANTAPG"))
    return refuse("it begins with KVANTAPG, as pages exported by version 0.1: export it again");
  if (!begins_with(kMagic)) return refuse("it does not begin with KVANTAPC");
  page.version = LoadBytes<uint32_t>(file.data() + 8);
  if (page.version != 1 && page.version != 2) return refuse(fmt::format("version {} is not 1 or 2", page.version));
  const size_t token_bytes = sizeof(int32_t) * size_t{LoadBytes<uint32_t>(file.data() + 12)};
  const size_t text_bytes = page.version == 1 ? 0 : LoadBytes<uint32_t>(file.data() + kTextBytesAt);
  const auto payload_bytes = LoadBytes<uint64_t>(file.data() + 16);
  const size_t rest = file.size() - kPageHeaderBytes;
  if (token_bytes > rest || text_bytes > rest - token_bytes || payload_bytes != rest - token_bytes - text_bytes) {
    return refuse(fmt::format("{} bytes of token ids, {} of an identity and a payload of {} do not make a file of {}",
                              token_bytes, text_bytes, payload_bytes, file.size()));
  }
  page.tokens = file.subspan(kPageHeaderBytes, token_bytes);
  const auto text = file.subspan(kPageHeaderBytes + token_bytes, text_bytes);
  page.identity_text = {reinterpret_cast<const char*>(text.data()), text.size()};
  page.payload = file.last(static_cast<size_t>(payload_bytes));
  page.checksum = LoadBytes<uint64_t>(file.data() + kChecksumAt);
  if (Checksum(file.first(file.size() - page.payload.size()), page.payload) != page.checksum) {
    return refuse("its checksum is wrong");
  }
  std::ranges::copy(file.subspan(kIdentityAt, page.identity.size()), page.identity.begin());
  std::ranges::copy(file.subspan(kKeyAt, page.id.key.size()), page.id.key.begin());
  const auto group = LoadBytes<uint32_t>(file.data() + kGroupAt);
  const auto kind = LoadBytes<uint32_t>(file.data() + kKindAt);
  if (group > kMaxGroup || kind >= std::size(cache::kPageKinds))
    return refuse(fmt::format("group {} and kind {} are no record's", group, kind));
  page.id.group = static_cast<int>(group);
  page.id.kind = cache::kPageKinds[kind];
  if (page.version == 2 && IdentityKey(page.identity_text) != page.identity) {
    return refuse("its identity's text and key do not agree");
  }
  return page;
}

PageFile ReadRecord(std::span<const uint8_t> file, const PageKey& identity, const RecordId& id) {
  PageFile page = ReadPageFile(file);
  if (!page.fault.empty()) return page;
  if (page.identity != identity) {
    page.fault = "it belongs to another model or cache format";
  } else if (page.id != id) {
    page.fault = "it is the record of another page";
  }
  return page;
}

PageFile ReadRecord(std::span<const uint8_t> file, const PageKey& identity, const RecordId& id,
                    std::span<const int32_t> tokens, size_t payload_bytes) {
  PageFile page = ReadRecord(file, identity, id);
  if (!page.fault.empty()) return page;
  if (page.payload.size() != payload_bytes) {
    page.fault = fmt::format("a payload of {} bytes, the record has {}", page.payload.size(), payload_bytes);
  } else if (page.tokens.size() != tokens.size_bytes() ||
             std::memcmp(page.tokens.data(), tokens.data(), tokens.size_bytes()) != 0) {
    page.fault = "it has other token ids";
  }
  return page;
}

}  // namespace kvanta::store
