// Strict JSON for untrusted files: duplicate keys, deep nesting and invalid UTF-8 are errors, and every
// error names the file, the key, the value and the expected one.
#pragma once

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace kvanta {

using Json = nlohmann::json;

// Throws InputError "NAME: ..." on anything that is not one JSON value of at most 64 levels with unique keys.
Json ParseJson(std::string_view text, const std::string& name);

// The text of a file of at most `max_bytes`. Throws InputError.
std::string ReadTextFile(const std::string& path, size_t max_bytes = size_t{64} << 20);

// A short printable form of a value for messages: scalars in full, containers as "a list of 3".
std::string Describe(const Json& value);

// One object of a file. A key whose value is null counts as absent, as in Hugging Face configs.
class JsonObject {
 public:
  // `where` is the path inside the file, "" at the top. Throws if `value` is not an object.
  JsonObject(const Json& value, std::string file, std::string where = "");

  bool Has(std::string_view key) const { return Find(key) != nullptr; }
  const Json* Find(std::string_view key) const;  // nullptr when absent or null
  const Json& Get(std::string_view key) const;   // throws when absent
  const Json& Value() const { return *value_; }
  const std::string& File() const { return file_; }

  int64_t Int(std::string_view key, int64_t min, int64_t max) const;
  int64_t Int(std::string_view key, int64_t min, int64_t max, int64_t missing) const;
  // Finite, min <= x <= max; integers are numbers too.
  double Number(std::string_view key, double min, double max) const;
  double Number(std::string_view key, double min, double max, double missing) const;
  bool Bool(std::string_view key, bool missing) const;
  // The same where transformers tests the value itself: null is false.
  bool BoolOrNull(std::string_view key, bool missing) const;
  std::string String(std::string_view key) const;
  std::string String(std::string_view key, std::string_view missing) const;
  JsonObject Object(std::string_view key) const;

  // "FILE: key 'a.b'" for the caller's messages.
  std::string Name(std::string_view key) const;
  // Throws InputError "FILE: key 'a.b' is VALUE; expected EXPECTED".
  [[noreturn]] void Fail(std::string_view key, std::string_view expected) const;

 private:
  const Json* value_;
  std::string file_;
  std::string where_;
};

}  // namespace kvanta
