"""Static scales, key means, query-aware matrices and outlier channels, measured on a text."""

from kvanta.calibration.calibrate import Calibration, calibrate
from kvanta.calibration.checkpoint_copy import save_checkpoint
from kvanta.calibration.default_text import default_tokens
from kvanta.calibration.scale_file import write_scale_file

__all__ = ["Calibration", "calibrate", "default_tokens", "save_checkpoint", "write_scale_file"]
