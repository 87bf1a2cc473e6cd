"""Pictures that commands write with --plot; matplotlib is an optional dependency."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvanta.errors import InputError, ResourceError, reason_of

_SUFFIXES = (".png", ".svg", ".pdf")


def check_picture(file: str) -> None:
    """Raises InputError, before the long work, if the picture could not be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError("--plot needs the package matplotlib; install it with: pip install 'kvanta[plot]'") from None
    if Path(file).suffix.lower() not in _SUFFIXES:
        raise InputError(f"--plot: {file!r} does not end in one of {', '.join(_SUFFIXES)}")


def new_figure(width: float, height: float) -> Any:
    """Figure of a size in inches, which can measure its labels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, file: str) -> None:
    """Raises ResourceError if the file cannot be written."""
    try:
        figure.savefig(file)
    except OSError as error:
        raise ResourceError(f"cannot write {file!r}: {reason_of(error)}") from None
