#include "base/json.h"

#include <fmt/format.h>

#include <cmath>
#include <set>
#include <utility>
#include <vector>

#include "base/memory_map.h"
#include "base/quote.h"
#include "kvanta/error.h"

namespace kvanta {

Json ParseJson(std::string_view text, const std::string& name) {
  constexpr int kMaxDepth = 64;
  std::vector<std::set<std::string>> keys;  // keys of each open object
  const Json::parser_callback_t check = [&](int depth, Json::parse_event_t event, Json& parsed) {
    switch (event) {
      case Json::parse_event_t::object_start:
        keys.emplace_back();
        [[fallthrough]];
      case Json::parse_event_t::array_start:
        if (depth > kMaxDepth) throw InputError(fmt::format("{}: nested deeper than {} levels", name, kMaxDepth));
        break;
      case Json::parse_event_t::key:
        if (!keys.back().insert(parsed.get_ref<const std::string&>()).second) {
          throw InputError(
              fmt::format("{}: key {} appears twice in one object", name, Quote(parsed.get_ref<const std::string&>())));
        }
        break;
      case Json::parse_event_t::object_end:
        keys.pop_back();
        break;
      default:
        break;
    }
    return true;
  };
  try {
    return Json::parse(text.begin(), text.end(), check);
  } catch (const Json::parse_error& error) {
    if (error.byte > text.size()) {
      throw InputError(fmt::format("{}: not valid JSON: {}", name, text.empty() ? "empty" : "it ends too early"));
    }
    throw InputError(fmt::format("{}: not valid JSON at byte {} of {}", name, error.byte, text.size()));
  } catch (const Json::exception& error) {
    throw InputError(fmt::format("{}: not valid JSON: {}", name, Quote(error.what())));
  }
}

std::string ReadTextFile(const std::string& path, size_t max_bytes) {
  const MemoryMap file(path);
  const auto bytes = file.Bytes();
  if (bytes.size() > max_bytes) {
    throw InputError(fmt::format("{}: {} bytes; at most {} are read", path, bytes.size(), max_bytes));
  }
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string Describe(const Json& value) {
  if (value.is_string()) return Quote(value.get_ref<const std::string&>());
  if (value.is_array()) return fmt::format("a list of {}", value.size());
  if (value.is_object()) return fmt::format("an object of {} keys", value.size());
  return value.dump();
}

JsonObject::JsonObject(const Json& value, std::string file, std::string where)
    : value_(&value), file_(std::move(file)), where_(std::move(where)) {
  if (value.is_object()) return;
  throw InputError(fmt::format("{}{} is {}; expected an object", file_,
                               where_.empty() ? ":" : fmt::format(": key {}", Quote(where_)), Describe(value)));
}

const Json* JsonObject::Find(std::string_view key) const {
  const auto found = value_->find(key);
  return found == value_->end() || found->is_null() ? nullptr : &*found;
}

std::string JsonObject::Name(std::string_view key) const {
  return fmt::format("{}: key {}", file_, Quote(where_.empty() ? std::string(key) : fmt::format("{}.{}", where_, key)));
}

void JsonObject::Fail(std::string_view key, std::string_view expected) const {
  const Json* value = Find(key);
  if (value == nullptr) throw InputError(fmt::format("{} is missing; expected {}", Name(key), expected));
  throw InputError(fmt::format("{} is {}; expected {}", Name(key), Describe(*value), expected));
}

const Json& JsonObject::Get(std::string_view key) const {
  const Json* value = Find(key);
  if (value == nullptr) throw InputError(fmt::format("{} is missing", Name(key)));
  return *value;
}

int64_t JsonObject::Int(std::string_view key, int64_t min, int64_t max) const {
  const Json* value = Find(key);
  // Unsigned values above int64's range would wrap in get<int64_t>().
  const bool fits = value != nullptr && value->is_number_integer() &&
                    (!value->is_number_unsigned() ||
                     value->get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()));
  if (fits) {
    const auto number = value->get<int64_t>();
    if (number >= min && number <= max) return number;
  }
  Fail(key, fmt::format("an integer from {} to {}", min, max));
}

int64_t JsonObject::Int(std::string_view key, int64_t min, int64_t max, int64_t missing) const {
  return Has(key) ? Int(key, min, max) : missing;
}

double JsonObject::Number(std::string_view key, double min, double max) const {
  const Json* value = Find(key);
  if (value != nullptr && value->is_number()) {
    const auto number = value->get<double>();
    if (std::isfinite(number) && number >= min && number <= max) return number;
  }
  Fail(key, fmt::format("a number from {} to {}", min, max));
}

double JsonObject::Number(std::string_view key, double min, double max, double missing) const {
  return Has(key) ? Number(key, min, max) : missing;
}

bool JsonObject::Bool(std::string_view key, bool missing) const {
  const Json* value = Find(key);
  if (value == nullptr) return missing;
  if (!value->is_boolean()) Fail(key, "true or false");
  return value->get<bool>();
}

bool JsonObject::BoolOrNull(std::string_view key, bool missing) const {
  return Bool(key, missing && !value_->contains(key));
}

std::string JsonObject::String(std::string_view key) const {
  const Json* value = Find(key);
  if (value == nullptr || !value->is_string()) Fail(key, "text");
  return value->get<std::string>();
}

std::string JsonObject::String(std::string_view key, std::string_view missing) const {
  return Has(key) ? String(key) : std::string(missing);
}

JsonObject JsonObject::Object(std::string_view key) const {
  return {Get(key), file_, where_.empty() ? std::string(key) : fmt::format("{}.{}", where_, key)};
}

}  // namespace kvanta
