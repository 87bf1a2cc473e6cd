"""A found scheme file on held-out text, compared with the best format that is the same in all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvanta.evaluate.summary import paired_difference
from kvanta.options.scheme_file import is_scheme_file


def against_uniform(rows: Mapping[str, Mapping[str, Any]], file: str, budget: float) -> dict[str, Any] | None:
    """The report of the comparison, for a scheme file and a budget of bits per element.

    `rows`: an evaluation's figures by name of format. None if the file or every uniform format of at most `budget`
    bits is missing among them.
    """
    fits = {
        name: row
        for name, row in rows.items()
        if not is_scheme_file(name) and "kl_mean" in row and row["bits_per_element"] <= budget + 1e-9
    }
    if "kl_mean" not in rows.get(file, {}) or not fits:
        return None
    best = min(fits, key=lambda name: float(fits[name]["kl_mean"]))
    difference, interval = paired_difference(rows[file]["kl_means"], fits[best]["kl_means"])
    return {
        "kl_mean": rows[file]["kl_mean"],
        "uniform": best,
        "uniform_bits_per_element": fits[best]["bits_per_element"],
        "uniform_kl_mean": fits[best]["kl_mean"],
        "difference": difference,
        "difference_ci95": interval,
    }


def line_of(file: str, budget: float, figures: Mapping[str, Any]) -> str:
    """The same for a person."""
    low, high = figures["difference_ci95"]
    verdict = "better" if high < 0 else "worse" if low > 0 else "indistinguishable"
    return (
        f"{file}: mean KL {figures['kl_mean']:.6f}; the best of at most {budget:g} bits that is the same in all "
        f"layers, {figures['uniform']}, {figures['uniform_kl_mean']:.6f}: {figures['difference']:+.6f} "
        f"({low:+.6f} to {high:+.6f}), {verdict}"
    )
