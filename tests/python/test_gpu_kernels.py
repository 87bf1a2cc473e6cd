"""benchmarks/gpu_kernels.py: what it reads from ptxas and nvdisasm."""

from __future__ import annotations

from gpu_kernels import class_of, main_loop, read_ptxas, read_sass, short_name

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5FirstPf' for 'sm_90'
ptxas info    : Function properties for _Z5FirstPf
    416 bytes stack frame, 520 bytes spill stores, 524 bytes spill loads
ptxas info    : Function properties for _Z6CalledPf
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 416 bytes cumulative stack size
ptxas info    : Compiling entry function '_Z6SecondPf' for 'sm_90'
ptxas info    : Function properties for _Z6SecondPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 31 registers, used 1 barriers, 1024 bytes smem
"""
SASS = """\
.text._Z5FirstPf:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_9:
        /*0010*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0020*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0030*/               @P0 BRA `(.L_x_9) ;
.L_x_1:
        /*0040*/                   LDGSTS.E.BYPASS.128 [R3], desc[UR4][R6.64] ;
.L_x_2:
        /*0050*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0060*/              @!P2 MUFU.EX2 R5, R5 ;
        /*0070*/                   PRMT R5, R5, 0x5410, R6 ;
        /*0080*/              @!P1 BRA `(.L_x_1) ;
        /*0090*/                   EXIT ;
        /*00a0*/                   FADD R1, R1, R2 ;
        /*00b0*/                   BRA `(.L_x_2) ;
.text._Z6SecondPf:
        /*0000*/                   EXIT ;
.L_x_3:
        /*0010*/                   BRA `(.L_x_3) ;
"""


def test_resources() -> None:
    assert read_ptxas(PTXAS) == {
        "_Z5FirstPf": {"registers": 128, "spill_bytes": 1044, "shared_bytes": 0},
        "_Z6SecondPf": {"registers": 31, "spill_bytes": 0, "shared_bytes": 1024},
    }


def test_the_main_loop_has_products_and_exponentials() -> None:
    code = read_sass(SASS)
    assert list(code) == ["_Z5FirstPf", "_Z6SecondPf"]
    assert len(code["_Z5FirstPf"].names) == 12
    # Not the loop with more products, and not up to the jump back from code that was moved out of it.
    assert main_loop(code["_Z5FirstPf"]) == (4, 8)
    assert main_loop(code["_Z6SecondPf"]) is None


PATHS = """\
.text._Z5ThirdPf:
.L_x_1:
        /*0000*/                   MUFU.EX2 R5, R5 ;
        /*0010*/               @P0 BRA `(.L_x_2) ;
        /*0020*/                   FMUL R4, R4, R5 ;
        /*0030*/                   FMUL R4, R4, R5 ;
.L_x_2:
        /*0040*/               @P1 BRA `(.L_x_3) ;
        /*0050*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0060*/                   BRA `(.L_x_4) ;
.L_x_3:
        /*0070*/                   FADD R1, R1, R2 ;
.L_x_4:
        /*0080*/               @P2 BRA `(.L_x_5) ;
        /*0090*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
.L_x_5:
        /*00a0*/               @P3 BRA `(.L_x_1) ;
        /*00b0*/                   EXIT ;
"""


def test_a_path_skips_what_products_and_barriers_do_not_need() -> None:
    code = read_sass(PATHS)["_Z5ThirdPf"]
    loop = main_loop(code)
    assert loop == (0, 10)
    assert code.path(loop) == {"mufu": 1, "branch": 5, "hmma": 1, "barrier": 1}


def test_names() -> None:
    assert [class_of(name) for name in ("LDGDEPBAR", "LDG.E.64", "LDL.LU", "F2FP.F16.F32.PACK_AB", "IMAD.WIDE")] == [
        "barrier",
        "ldg",
        "local",
        "convert",
        "other",
    ]
    demangled = (
        "void kvanta::kernels::cuda::(anonymous namespace)::AttentionEntry<kvanta::kernels::cuda::StaticKernel"
        "<kvanta::formats::Int4, (int)128>>(kvanta::kernels::cuda::AttentionParams)"
    )
    assert short_name(demangled) == "AttentionEntry<StaticKernel<Int4, 128>>"


COUNTED = """\
.text._Z6NestedPf:
.L_x_1:
        /*0000*/                   MUFU.EX2 R5, R5 ;
.L_x_2:
        /*0010*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0020*/                   VIADD R9, R9, 0x4 ;
        /*0030*/                   ISETP.NE.AND P0, PT, R9, 0x10, PT ;
        /*0040*/               @P0 BRA `(.L_x_2) ;
        /*0050*/               @P1 BRA `(.L_x_1) ;
        /*0060*/                   EXIT ;
"""


def test_loops_to_a_constant_are_on_the_path_as_often_as_they_run() -> None:
    code = read_sass(COUNTED)["_Z6NestedPf"]
    assert main_loop(code) == (0, 5)
    assert code.trips((1, 4)) == 4
    assert code.path((0, 5)) == {"mufu": 1, "hmma": 4, "other": 8, "branch": 5}
