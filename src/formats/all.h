// The list of formats. A new one is its file, and its line here: page bytes, parsing, --help, Python names, the table
// in docs/formats.md, typed tests and benchmark rows derive from it. Its order is the order in which names are listed.
#pragma once

#include "formats/bf16.h"
#include "formats/fp16.h"
#include "formats/fp32.h"
#include "formats/fp8_e4m3.h"
#include "formats/fp8_e5m2.h"
#include "formats/int4.h"
#include "formats/int8.h"

namespace kvanta::formats {

template <class... T>
struct TypeList {};

using FormatList = TypeList<  //
    Fp32,                     //
    Bf16,                     //
    Fp16,                     //
    Fp8E4m3,                  //
    Fp8E5m2,                  //
    Int8,                     //
    Int4>;

}  // namespace kvanta::formats
