"""SPIN's Figs. 3 and 4 on live steps: padding of unlike windows, and how long target and drafts are idle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from distillspec.serving.base.plans import StepResult


class Idle:
    """Sums over steps of decoding rows. Steps that read prompts are left out.

    Attributes:
        tokens: of the target's passes.
        rectangle: of the same passes if every row were padded to the longest.
        total_s, target_s, draft_s: seconds of the steps, and in them of the target and of the drafts.
    """

    def __init__(self) -> None:
        self.tokens = self.rectangle = 0
        self.total_s = self.target_s = self.draft_s = 0.0

    def add(self, result: StepResult | None) -> None:
        """Add a step."""
        if result is None or result.prefill_tokens or not result.rows:
            return
        windows = [1 + row.nodes for row in result.rows]
        self.tokens += sum(windows)
        self.rectangle += len(windows) * max(windows)
        self.total_s += result.total_s
        self.target_s += result.target_s
        self.draft_s += result.draft_s

    def shares(self) -> dict[str, float]:
        """Return the share of a padded pass that pads, and those of the time that target and drafts are idle."""
        return {
            "padding": 1 - self.tokens / self.rectangle if self.rectangle else 0.0,
            "target_idle": 1 - self.target_s / max(self.total_s, 1e-12),
            "draft_idle": 1 - self.draft_s / max(self.total_s, 1e-12),
        }


def idle_table(shares: Mapping[str, Mapping[str, float]], names: Iterable[str]) -> Sequence[str]:
    """Return lines of a table of some sides' `shares`, by side."""
    lines = ["| drafts by | padding of a padded pass | target idle | drafts idle |", f"|{'---|' * 4}"]
    for name in names:
        cells = " | ".join(f"{shares[name][share]:.0%}" for share in ("padding", "target_idle", "draft_idle"))
        lines.append(f"| {name} | {cells} |")
    return lines
