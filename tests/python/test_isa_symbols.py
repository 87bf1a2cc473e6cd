"""tools/check_isa_symbols.py must fail on what it is there for."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "check_isa_symbols.py"
HEADER = "namespace kvanta::kernels { int PortableTable(); }\n"
CLEAN = "namespace { int Twice(int x) { return 2 * x; } }\nint kvanta::kernels::PortableTable() { return Twice(1); }\n"
COMPILER = shutil.which("c++") or ""


def check(folder: Path, source: str, name: str = "isa_portable") -> tuple[int, str]:
    unit = folder / f"{name}.cc"
    unit.write_text(HEADER + source)
    subprocess.run([COMPILER, "-std=c++20", "-O0", "-c", unit, "-o", f"{unit}.o"], check=True)
    done = subprocess.run([sys.executable, TOOL, f"{unit}.o"], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
class TestIsaSymbols:
    def test_a_unit_that_exports_its_table_passes(self, tmp_path: Path) -> None:
        assert check(tmp_path, CLEAN) == (0, "summary: 1 ISA units, 0 symbols that a linker could share\n")

    def test_an_inline_function_fails(self, tmp_path: Path) -> None:
        code, output = check(
            tmp_path, "inline int Leak() { return 3; }\nint kvanta::kernels::PortableTable() { return Leak(); }\n"
        )
        assert code == 1
        assert "weak symbol Leak()" in output

    def test_a_standard_template_fails(self, tmp_path: Path) -> None:
        code, output = check(
            tmp_path, "#include <algorithm>\nint kvanta::kernels::PortableTable() { return std::max(1, 2); }\n"
        )
        assert code == 1
        assert "std::max" in output

    def test_a_second_global_function_fails(self, tmp_path: Path) -> None:
        code, output = check(tmp_path, CLEAN + "int Helper() { return 4; }\n")
        assert code == 1
        assert "global symbol Helper()" in output

    def test_objects_without_a_unit_fail(self, tmp_path: Path) -> None:
        assert check(tmp_path, CLEAN, "other")[0] == 1
