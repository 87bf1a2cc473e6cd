// Tensors of one module of a quantized checkpoint.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "base/thread_pool.h"
#include "weights/safetensors.h"

namespace kvanta::weights {

// Finds tensors by the rest of their name after the module's ("weight_scale"), and records what was read.
class ModuleTensors {
 public:
  ModuleTensors(const Checkpoint& checkpoint, std::string module, ThreadPool& threads)
      : checkpoint_(checkpoint), module_(std::move(module)), threads_(threads) {}

  const TensorView* Find(std::string_view part);  // nullptr when absent
  const TensorView& Get(std::string_view part);   // throws InputError
  // Throws unless the tensor has this type (one of a list, "|" between them) and shape.
  const TensorView& Get(std::string_view part, std::string_view types, std::initializer_list<int64_t> shape);
  // All values of a tensor as f32, of F32, F16, BF16, or F8_E8M0. Throws at values that are not finite, and at zeros
  // unless `allow_zero`.
  std::vector<float> Floats(std::string_view part, bool allow_zero = false);
  // All values of an I32 or I64 tensor. Throws at values outside of int32.
  std::vector<int32_t> Integers(std::string_view part);
  // Scales of activations, which are not quantized: read, and not used.
  void IgnoreActivations();

  std::string Name(std::string_view part) const;  // name of the tensor
  // Throws InputError "FOLDER: tensor 'NAME' PROBLEM".
  [[noreturn]] void Fail(std::string_view part, const std::string& problem) const;
  ThreadPool& Threads() const { return threads_; }
  const std::vector<std::string>& Read() const { return read_; }

 private:
  const Checkpoint& checkpoint_;
  std::string module_;
  ThreadPool& threads_;
  std::vector<std::string> read_;
};

}  // namespace kvanta::weights
