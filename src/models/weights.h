// Reader of a checkpoint's weights: checks shapes and finite values, and packs. Quantized weights keep their codes
// where the device has kernels for them (docs/weights.md).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "kernels/ops.h"
#include "models/config/config.h"
#include "parallel/communicator.h"
#include "weights/quantization_config.h"
#include "weights/safetensors.h"

namespace kvanta::models {

// One matrix [out][in] of a stack, by the name of its module ("model.layers.0.mlp.up_proj").
struct StackedWeight {
  std::string module;
  int64_t out = 0;
  int64_t interleaved_heads = 0, interleaved_first = 0;  // weights::WeightView's, where the architecture stores rows so
  // Rows of the module's tensor, and the first of these that is a row of the weight, where it is a part of the tensor.
  int64_t tensor_out = 0, tensor_first = 0;
  bool whole = false;  // every rank has all rows

  int64_t TensorOut() const noexcept { return tensor_out == 0 ? out : tensor_out; }
};

class WeightReader {
 public:
  // `keep_types`: linear layers keep the types of a GGUF file where they can; the kinds given below are for the others.
  // keep_quantized: the same for weights of a quantized Hugging Face checkpoint (docs/weights.md).
  WeightReader(const weights::Checkpoint& checkpoint, kernels::Ops& ops, bool keep_types = false,
               const weights::QuantizationConfig& quantization = {}, bool keep_quantized = false,
               const parallel::Communicator* ranks = nullptr);

  // True if the checkpoint has the tensor.
  bool Has(std::string_view name) const { return checkpoint_.Find(name) != nullptr; }
  // True if the checkpoint has the tensor in this shape.
  bool HasShape(std::string_view name, std::span<const int64_t> shape) const;
  // The modules' weights [out][in], and their biases [out] if `bias`, packed as one linear layer of `kind`: of each,
  // the rows of this rank (parallel::Partition).
  std::unique_ptr<kernels::Linear> Linear(std::span<const StackedWeight> stack, int64_t in, bool bias,
                                          kernels::LinearKind kind);
  std::unique_ptr<kernels::Linear> Linear(std::initializer_list<StackedWeight> stack, int64_t in, bool bias,
                                          kernels::LinearKind kind) {
    return Linear(std::span(stack.begin(), stack.size()), in, bias, kind);
  }
  Device& device() const noexcept { return ops_.device(); }
  // True: Linear() takes weights that are stored [in][out], by elements.
  void SetTransposed(bool transposed) noexcept { transposed_ = transposed; }
  // True if a linear layer keeps the module's weights in blocks that amplify the rounding of 8-bit activations.
  bool AmplifiesRounding(std::string_view module) const;
  // The rows of this rank of a matrix [out][in] as f32, to be split or transposed before Pack; finite in `store`.
  // `name`: "MODULE.weight".
  std::vector<float> Matrix(const std::string& name, int64_t out, int64_t in, kernels::WeightType store);
  // Packs values [out][in], with biases [out] or none. `module`: their name in reports.
  std::unique_ptr<kernels::Linear> Pack(std::span<const float> values, int64_t out, int64_t in,
                                        std::span<const float> bias, kernels::LinearKind kind, std::string_view module);
  std::unique_ptr<kernels::Linear> Pack(std::span<const weights::WeightView> stacked, std::span<const float> bias,
                                        kernels::LinearKind kind);
  // True if the checkpoint has a tensor whose name begins like this.
  bool HasPrefix(std::string_view prefix) const;
  // Skips the tensors whose names begin like this, as far as they were not read: other ranks read them.
  void SkipTensors(std::string_view prefix);
  // A tensor of any type as it is stored. Throws InputError for another shape.
  const weights::TensorView& Tensor(const std::string& name, std::span<const int64_t> shape);
  // The elements of a tensor of any number of dimensions as rows of the last one, finite in `store`.
  weights::WeightView Elements(const std::string& name, std::span<const int64_t> shape, kernels::WeightType store);
  // A vector of `size` values as f32 on the host.
  std::vector<float> Values(const std::string& name, int64_t size);
  // A value of the shape [] or [1].
  float Scalar(const std::string& name);
  // As Values(), to be kept on the host: counted in Bytes().
  std::vector<float> KeptValues(const std::string& name, int64_t size);
  // A vector of `size` values plus `offset`, times `scale`, as f32 in the device's memory; with `rows`, [rows][size].
  Buffer Vector(const std::string& name, int64_t size, float offset = 0, double scale = 1, int64_t rows = 0);
  // Throws InputError if the checkpoint has tensors of the decoder that were not read. `spare` layers after the model's
  // `layers` may be left, and modules that predict further tokens.
  void CheckUnusedTensors(const TensorNames::Decoder& names, int layers, int spare) const;
  // True if quantized weights of a layer of `kind` keep their codes.
  bool KeepsQuantized(kernels::LinearKind kind) const noexcept {
    return keep_quantized_ && kind.weights != kernels::WeightType::kF32;
  }
  // Bytes of all weights read so far, as packed.
  int64_t Bytes() const { return bytes_; }
  // Counts what a block keeps of Elements().
  void AddBytes(int64_t bytes) { bytes_ += bytes; }

 private:
  weights::WeightView Read(const std::string& name, std::span<const int64_t> shape);
  weights::WeightView ReadWeight(const StackedWeight& weight, int64_t in);
  weights::WeightView ReadTransposed(const StackedWeight& weight, int64_t in);
  void CheckWeight(const weights::WeightView& view, kernels::WeightType store) const;
  // Null for a weight that is stored by elements or in blocks.
  std::unique_ptr<weights::QuantizedWeight> FindQuantized(const StackedWeight& weight, int64_t in, bool has_bias);
  // A quantized weight as f32 [out][in], finite in `store`.
  std::vector<float> Expand(const weights::QuantizedWeight& weight, const std::string& module,
                            kernels::WeightType store) const;
  // Some or all of `quantized` are not null.
  std::unique_ptr<kernels::Linear> QuantizedLinear(std::span<const StackedWeight> stack,
                                                   std::span<const std::unique_ptr<weights::QuantizedWeight>> quantized,
                                                   int64_t in, std::span<const float> bias, kernels::LinearKind kind);
  // Rows of a StackedWeight.
  struct Rows {
    int64_t first = 0, count = 0;
  };
  Rows RowsOf(const StackedWeight& weight) const noexcept;  // this rank's
  void AppendVector(const std::string& name, const StackedWeight& weight, Rows rows, std::vector<float>& out);
  // Gives back the memory of the tensors that were read since the last call.
  void ReleaseTensors() noexcept;

  const weights::Checkpoint& checkpoint_;
  kernels::Ops& ops_;
  bool keep_types_;
  const weights::QuantizationConfig quantization_;
  const bool keep_quantized_;
  const parallel::Communicator* ranks_;  // null: alone
  bool transposed_ = false;
  int64_t bytes_ = 0;
  std::set<std::string, std::less<>> read_;
  std::vector<const weights::TensorView*> mapped_;  // read, and not released yet
  // Copies of tensors that are misaligned in the file, and of transposed ones.
  std::vector<std::vector<uint32_t>> aligned_;
};

// Element `i` of a weight stored by elements, in the order of the file.
float ElementValue(const weights::WeightView& weight, int64_t i) noexcept;

}  // namespace kvanta::models
