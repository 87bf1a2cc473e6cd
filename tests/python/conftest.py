"""What all tests need: the oracles of tests/oracle can be imported, and Ctrl-C works."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "oracle"))

# A run in the background inherits interrupts that are ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
