#include "weights/gguf_index.h"

#include "fuzz/fuzz_input.h"
#include "weights/weight_view.h"

using namespace kvanta;  // NOLINT(google-build-using-namespace)

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::MustReadOrRefuse([&] {
    const weights::GgufIndex index = weights::ParseGgufIndex(fuzz::Text({data, size}), "fuzz");
    for (const auto& [name, tensor] : index.tensors) {
      // Every tensor must lie inside its file, and every row inside its tensor.
      const uint64_t file_size = index.files.at(tensor.file).size;
      if (tensor.shape.empty() || tensor.offset > file_size || tensor.bytes > file_size - tensor.offset) {
        __builtin_trap();
      }
      const weights::WeightView view{
          .out = tensor.shape.front(), .in = 1, .interleaved_heads = tensor.interleaved_heads};
      for (const int64_t row : {int64_t{0}, view.out / 2, view.out - 1}) {
        if (view.StoredRow(row) < 0 || view.StoredRow(row) >= view.out) __builtin_trap();
      }
    }
  });
  return 0;
}
