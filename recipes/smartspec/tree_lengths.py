"""Equation 10: tokens a step of a tree as the paper prints them, beside the exact value of its assumptions."""

from __future__ import annotations

from pathlib import Path

from distillspec.files import write_csv
from distillspec.recipes.smartspec.claims import Claim
from distillspec.recipes.smartspec.expected_length import full_tree, paper_eq10
from distillspec.serving.simulation.policies import HEADS, MOST_CANDIDATES

ALPHAS = (0.6, 0.8)  # of Figs. 15 and 16
NEAR = 0.03  # relative


def lengths(alpha: float, width: int) -> tuple[float, float]:
    """Return (exact, Eq. 10) tokens a step of a tree with `width` candidates a head.

    The r-th candidate is accepted with probability α (1 − α)^(r − 1), so a head succeeds with 1 − (1 − α)^width in
    both. They differ in how the equation accounts for the end of a path.
    """
    head = [alpha * (1 - alpha) ** rank for rank in range(width)]
    return full_tree([head] * HEADS), paper_eq10([alpha] * HEADS, [width] * HEADS)


def write_lengths(folder: Path) -> list[Claim]:
    """Write `eq10.csv`. Return whether the equation is near the exact length."""
    tokens = {(alpha, width): lengths(alpha, width) for alpha in ALPHAS for width in range(1, MOST_CANDIDATES + 1)}
    rows = ([*key, f"{exact:.4f}", f"{printed:.4f}"] for key, (exact, printed) in tokens.items())
    write_csv(folder / "eq10.csv", ["alpha", "width", "exact", "eq10"], rows)
    seen = "; ".join(
        f"α {alpha}, top-{width}: {printed:.2f} for {exact:.2f}" for (alpha, width), (exact, printed) in tokens.items()
    )
    near = all(abs(printed / exact - 1) <= NEAR for exact, printed in tokens.values())
    return [Claim("eq10", "Eq. 10 tells how many tokens a tree gives", seen, near)]
