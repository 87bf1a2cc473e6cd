// Command-line options of benchmark programs: --name VALUE, or --name VALUE... for lists.
#pragma once

#include <fmt/format.h>

#include <charconv>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <system_error>
#include <type_traits>
#include <vector>

#include "kvanta/error.h"

namespace kvanta {

class OptionParser {
 public:
  // The word before all options.
  void Positional(std::string& value) { positional_ = &value; }
  template <class Value>
  void Option(const std::string& name, Value& value) {
    options_[name] = {.add = [=, &value](const std::string& word) { value = ParseValue<Value>(name, word); }};
  }
  // Values that are given replace all those of the list.
  template <class Value>
  void Option(const std::string& name, std::vector<Value>& values) {
    options_[name] = {.add = [=, &values](const std::string& word) { values.push_back(ParseValue<Value>(name, word)); },
                      .clear = [&values] { values.clear(); }};
  }
  // A list of pairs of numbers, as in 64x8192; Pair has these two as its members.
  template <class Pair>
  void Pairs(const std::string& name, std::vector<Pair>& pairs) {
    options_[name] = {.add =
                          [=, &pairs](const std::string& word) {
                            const size_t cross = word.find('x');
                            if (cross == word.npos)
                              throw InputError(fmt::format("{} {}: not as in 64x8192", name, word));
                            Pair& pair = pairs.emplace_back();
                            auto& [first, second] = pair;
                            first = ParseValue<std::decay_t<decltype(first)>>(name, word.substr(0, cross));
                            second = ParseValue<std::decay_t<decltype(second)>>(name, word.substr(cross + 1));
                          },
                      .clear = [&pairs] { pairs.clear(); }};
  }

  // Throws InputError for what is no option, and for options without values or with wrong ones.
  void Parse(int argc, char** argv) const {
    std::string name;
    bool has_value = true;
    for (int i = 1; i < argc; ++i) {
      const std::string word = argv[i];
      if (word.starts_with("--")) {
        CheckValue(name, has_value);
        name = word;
        has_value = false;
        const OptionReader& option = Find(name);
        if (option.clear) option.clear();
      } else if (!name.empty()) {
        const OptionReader& option = Find(name);
        if (has_value && !option.clear) throw InputError(fmt::format("{} takes one value, got {}, too", name, word));
        option.add(word);
        has_value = true;
      } else if (positional_ != nullptr && positional_->empty()) {
        *positional_ = word;
      } else {
        throw InputError(fmt::format("{} belongs to no option", word));
      }
    }
    CheckValue(name, has_value);
  }

 private:
  struct OptionReader {
    std::function<void(const std::string&)> add;
    std::function<void()> clear = {};  // clears a list
  };

  const OptionReader& Find(const std::string& name) const {
    if (const auto found = options_.find(name); found != options_.end()) return found->second;
    std::string known;
    for (const auto& [other, reader] : options_) known += fmt::format("{}{}", known.empty() ? "" : ", ", other);
    throw InputError(fmt::format("unknown option {}; known: {}", name, known));
  }
  static void CheckValue(const std::string& name, bool has_value) {
    if (!has_value) throw InputError(fmt::format("{} needs a value", name));
  }
  template <class Value>
  static Value ParseValue(const std::string& name, const std::string& word) {
    if constexpr (std::is_same_v<Value, std::string>) {
      return word;
    } else {
      Value number = 0;
      const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), number);
      if (error == std::errc() && end == word.data() + word.size()) return number;
      throw InputError(
          fmt::format("{} {}: not a whole number of at most {}", name, word, std::numeric_limits<Value>::max()));
    }
  }

  std::map<std::string, OptionReader> options_;
  std::string* positional_ = nullptr;
};

}  // namespace kvanta
