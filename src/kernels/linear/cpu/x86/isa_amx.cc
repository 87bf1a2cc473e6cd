// Kernels of quantized weights, in blocks or with scales apart, of the AMX unit: those of the AVX-512 unit, with tiles
// for many rows.
#include "kernels/linear/cpu/x86/blocks_avx512.h"
// Primitives first, then the kernels written over them.
#include "kernels/cpu/isa_table.h"
#include "kernels/linear/cpu/x86/amx_quantized.h"
#include "kernels/linear/cpu/x86/block_tiles.h"

namespace kvanta::kernels {

const BlockKernels& AmxBlockKernels() {
  static const BlockKernels kernels = [] {
    BlockKernels tiled = Avx512BlockKernels();
    SetBlockTiles(tiled);
    return tiled;
  }();
  return kernels;
}

const QuantizedKernels& AmxQuantizedKernels() {
  static const QuantizedKernels kernels = [] {
    QuantizedKernels tiled = Avx512QuantizedKernels();
    SetQuantizedTiles(tiled);
    return tiled;
  }();
  return kernels;
}

}  // namespace kvanta::kernels
