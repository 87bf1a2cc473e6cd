"""Process of one model, started by kvanta.server.models.process as a script: `kvanta` with the further arguments.

The first argument is the id of the parent, with which this process ends, however that ends.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # sys/prctl.h

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(sys.argv.pop(1)):  # it had ended before
        sys.exit(1)
    sys.path[0] = str(Path(__file__).parents[3])  # the folder of the package, in place of this script's
    runpy.run_module("kvanta", run_name="__main__", alter_sys=True)
