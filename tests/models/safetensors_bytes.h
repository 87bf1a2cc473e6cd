// Makes safetensors files, honest and lying ones.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvanta::models {

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
    std::string sizes;
    for (const int64_t size : shape) sizes += (sizes.empty() ? "" : ",") + std::to_string(size);
    const size_t begin = data_.size();
    data_.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
    if (!header_.empty()) header_ += ",";
    header_ += "\"" + name + "\":{\"dtype\":\"F32\",\"shape\":[" + sizes + "],\"data_offsets\":[" +
               std::to_string(begin) + "," + std::to_string(data_.size()) + "]}";
  }
  std::string File() const { return SafetensorsFile("{" + header_ + "}", data_); }

 private:
  std::string header_, data_;
};

}  // namespace kvanta::models
