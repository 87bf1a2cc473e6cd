// Linear layers of the AMX unit: those of the AVX-512 unit, with tiles for bf16 and, of quantized weights, for many
// rows.
#include "kernels/linear/cpu/x86/blocks_avx512.h"
// Primitives first, then the kernels written over them.
#include "kernels/cpu/isa_table.h"
#include "kernels/linear/cpu/x86/amx.h"
#include "kernels/linear/cpu/x86/amx_group_quant.h"
#include "kernels/linear/cpu/x86/block_tiles.h"

namespace kvanta::kernels {

const LinearKernels& AmxLinearKernels() {
  static const BlockKernels blocks = [] {
    BlockKernels tiled = *Avx512LinearKernels().blocks;
    SetBlockTiles(tiled);
    return tiled;
  }();
  static const QuantizedKernels quantized = [] {
    QuantizedKernels tiled = *Avx512LinearKernels().quantized;
    SetQuantizedTiles(tiled);
    return tiled;
  }();
  static const LinearKernels kernels = [] {
    LinearKernels result = Avx512LinearKernels();
    result.bf16 = kBf16TileKernels;
    result.blocks = &blocks;
    result.quantized = &quantized;
    return result;
  }();
  return kernels;
}

}  // namespace kvanta::kernels
