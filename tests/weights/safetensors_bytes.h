// Makes safetensors files, honest and lying ones.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvanta::weights {

// A file with this header and this data, and a length field that says the truth.
inline std::string SafetensorsFile(std::string_view header, std::string_view data = "") {
  std::string file(8, '\0');
  for (int i = 0; i < 8; ++i) file[i] = static_cast<char>(uint64_t{header.size()} >> (8 * i));
  return file.append(header).append(data);
}

// Collects f32 tensors.
class SafetensorsWriter {
 public:
  void Add(const std::string& name, const std::vector<int64_t>& shape, const std::vector<float>& values) {
    const size_t begin = data_.size();
    data_.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
    header_ += fmt::format(R"({}"{}":{{"dtype":"F32","shape":[{}],"data_offsets":[{},{}]}})",
                           header_.empty() ? "" : ",", name, fmt::join(shape, ","), begin, data_.size());
  }
  std::string File() const { return SafetensorsFile("{" + header_ + "}", data_); }

 private:
  std::string header_, data_;
};

}  // namespace kvanta::weights
