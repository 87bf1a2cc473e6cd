// Kernels of weights in blocks of the unit of kernels/cpu/isa_portable.cc: a file of their own, since they take as long
// to compile as the rest.
#include "kernels/linear/cpu/blocks_portable.h"
// Primitives first, then the kernels written over them.
#include "kernels/cpu/isa_table.h"
#include "kernels/linear/cpu/block_kernels.h"

namespace kvanta::kernels {

const BlockKernels& PortableBlockKernels() {
  static constexpr BlockKernels kKernels = MakeBlockKernels();
  return kKernels;
}

}  // namespace kvanta::kernels
