"""Static scales, key means, query-aware matrices and outlier channels, measured on a text."""

from kvanta.calibration.calibrate import DEFAULT_TEXT, Calibration, calibrate
from kvanta.calibration.checkpoint_copy import save_checkpoint
from kvanta.calibration.scale_file import write_scale_file

__all__ = ["DEFAULT_TEXT", "Calibration", "calibrate", "save_checkpoint", "write_scale_file"]
