// What one ISA unit (isa_<isa>.cc) exports: one table of plain functions, chosen once at run time (select.h).
#pragma once

#include "kernels/cpu/roofline_table.h"
#include "kernels/cpu/row_table.h"
#include "kernels/linear/cpu/table.h"

namespace kvanta::kernels {

struct AttentionKernels;

struct IsaTable {
  const char* name = nullptr;  // "amx", "avx512", "avx2", "portable"
  LinearKernels linear;
  RowKernels rows;
  LimitKernels limits;
  const AttentionKernels* attention = nullptr;
};

const IsaTable& PortableTable();
const IsaTable& Avx2Table();
const IsaTable& Avx512Table();
const IsaTable& AmxTable();

}  // namespace kvanta::kernels
