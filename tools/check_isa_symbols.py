#!/usr/bin/env python3
"""Checks that ISA units export no symbols that a linker may share with other units.

An inline function or template instance is a weak symbol in every object that emits it, and the linker keeps any one of
them. If an ISA unit emits one, a CPU without that ISA may run it. So a unit exports its table and nothing else.

Usage: check_isa_symbols.py [--nm NM] OBJECT...   (other objects are ignored)
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

UNIT = re.compile(r"(?:^|/)isa_(\w+)\.cc\.o(?:bj)?$")
TABLE = re.compile(r"kvanta::kernels::\w+(Table|LinearKernels)\(\)$")
# Per-object copies that the C++ runtime needs; they have no code.
RUNTIME = re.compile(r"DW\.ref\.|__odr_asan")


def faults(listing: str) -> list[str]:
    """Returns the lines of `nm -C` that an ISA unit must not have."""
    found = []
    for line in listing.splitlines():
        match = re.match(r"(?:[0-9a-f]+)?\s+(\w)\s+(.*)$", line)
        if match is None:
            continue
        kind, name = match.groups()
        if kind in "Ww" and line.startswith(" "):
            continue  # a weak reference, not a definition
        if kind in "VWu" and not RUNTIME.match(name):
            found.append(f"weak symbol {name}")
        elif kind in "TDBRG" and not TABLE.match(name) and not RUNTIME.match(name):
            found.append(f"global symbol {name}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nm", default="nm")
    parser.add_argument("objects", nargs="+")
    arguments = parser.parse_args()
    units = [path for path in arguments.objects if UNIT.search(Path(path).as_posix())]
    if not units:
        print("no ISA unit among the objects", file=sys.stderr)
        return 1
    count = 0
    for unit in units:
        listing = subprocess.run([arguments.nm, "-C", unit], check=True, capture_output=True, text=True).stdout
        for fault in faults(listing):
            print(f"{Path(unit).name}: {fault}", file=sys.stderr)
            count += 1
    print(f"summary: {len(units)} ISA units, {count} symbols that a linker could share")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
