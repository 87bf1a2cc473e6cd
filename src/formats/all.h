// The list of formats. A new one is its file, and its line here: page bytes, parsing, --help, Python names, the table
// in docs/formats.md, typed tests and benchmark rows derive from it. Its order is the order in which names are listed.
#pragma once

#include "formats/bf16.h"
#include "formats/fp16.h"
#include "formats/fp32.h"
#include "formats/fp8_e4m3.h"
#include "formats/fp8_e5m2.h"
#include "formats/fp8_per_token_head.h"
#include "formats/int2_g32.h"
#include "formats/int3_g32.h"
#include "formats/int4.h"
#include "formats/int4_per_token_head.h"
#include "formats/int5_g32.h"
#include "formats/int6_g32.h"
#include "formats/int8.h"
#include "formats/int8_g32.h"
#include "formats/kivi2.h"
#include "formats/kivi3.h"
#include "formats/kivi4.h"
#include "formats/klt.h"
#include "formats/klt_group.h"
#include "formats/mla.h"
#include "formats/mxfp4.h"
#include "formats/mxfp6_e3m2.h"
#include "formats/mxfp8.h"
#include "formats/nvfp4.h"
#include "formats/trellis.h"
#include "formats/turboquant.h"

namespace kvanta::formats {

template <class... T>
struct TypeList {};

using FormatList = TypeList<  //
    Fp32,                     //
    Bf16,                     //
    Fp16,                     //
    Fp8E4m3,                  //
    Fp8E5m2,                  //
    Fp8PerTokenHead,          //
    Mxfp8,                    //
    Mxfp6E3m2,                //
    Int8,                     //
    Int8Block,                //
    Int6Block,                //
    Int5Block,                //
    Int4,                     //
    Int4PerTokenHead,         //
    Trellis4,                 //
    Int3Block,                //
    Trellis3,                 //
    Klt3,                     //
    Klt3Group,                //
    Int2Block,                //
    Trellis2,                 //
    Klt2,                     //
    Klt2Group,                //
    Nvfp4,                    //
    Nvfp4FourOverSix,         //
    Mxfp4,                    //
    Fp4E2m1,                  //
    Kivi4,                    //
    Kivi3,                    //
    Kivi2,                    //
    TurboquantK8V4,           //
    Turboquant4BitNc,         //
    TurboquantK3V4Nc,         //
    Turboquant3BitNc,         //
    MlaFp8,                   //
    MlaFp8E5m2,               //
    MlaInt8,                  //
    MlaInt4,                  //
    MlaNvfp4>;

}  // namespace kvanta::formats
