"""Stopwatch over the parts of an engine's steps."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from distillspec.serving import Engine


class Stopwatch:
    """Times the parts of an engine's steps by wrapping their methods."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.spent: Counter[str] = Counter()
        self.parts = list[str]()
        for part, owner, method in (
            ("target passes", engine.runner, "read"),
            ("target passes", engine.runner, "logits"),
            ("drafting", engine.proposer, "propose"),
            ("verdicts", engine.sampler, "verify"),
            ("commit and text", engine.committer, "commit"),
            ("lengths", engine.controller, "plan"),
            ("lengths", engine.controller, "observe"),
        ):
            self._watch(part, owner, method)

    def step(self) -> dict[str, float]:
        """Run one step and return its seconds by part. `own work`: all but the target's passes and drafting.

        A draft's passes may be one call with its draws, so these are no work of the engine's own.
        """
        self.spent.clear()
        begun = time.perf_counter()
        self.engine.step()
        total = time.perf_counter() - begun
        rest = total - sum(self.spent.values())
        own_work = total - self.spent["target passes"] - self.spent["drafting"]
        parts = {part: self.spent[part] for part in self.parts}
        return {**parts, "planning and all else": rest, "own work": own_work, "step": total}

    def _watch(self, part: str, owner: Any, method: str) -> None:
        plain = getattr(owner, method)
        self.parts.append(part)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return plain(*args, **kwargs)
            finally:
                self.spent[part] += time.perf_counter() - begun

        setattr(owner, method, timed)
