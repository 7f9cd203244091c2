"""Progress of long work: a live bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

LINE_EVERY_S = 15.0


class ProgressLine:
    """One piece of work: `update` with the share done and a few words."""

    def __init__(self, title: str, bar: Progress | None) -> None:
        self.title = title
        self._bar = bar
        self._task = bar.add_task(title, total=1.0, note="") if bar is not None else None
        self._started = self._last = time.monotonic()
        self._pace_from: tuple[float, float] | None = None  # (elapsed seconds, share done) at the first call of `left`

    def update(self, fraction: float, note: str) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=fraction, note=note)
        elif time.monotonic() - self._last >= LINE_EVERY_S:
            self._last = time.monotonic()
            print(f"{self.title}: {100 * fraction:3.0f} % {note}", flush=True)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def left(self, fraction: float) -> str:
        """Return the time left as m:ss, at the pace since the first call: a resumed run starts with a share done."""
        if self._pace_from is None:
            self._pace_from = (self.elapsed_s, fraction)
        since_s, since = self._pace_from
        if fraction <= since:
            return "?"
        seconds = int((self.elapsed_s - since_s) * (1 - fraction) / (fraction - since))
        return f"{seconds // 60}:{seconds % 60:02d}"


@contextmanager
def progress(title: str) -> Iterator[ProgressLine]:
    """Show a bar on a terminal, or else a line each 15 s, and a last line with the time it took."""
    if not sys.stdout.isatty():
        line = ProgressLine(title, None)
        print(f"{title} …", flush=True)
        yield line
        print(f"{title}: done in {line.elapsed_s:.0f} s", flush=True)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console()) as bar:
        yield ProgressLine(title, bar)


class TokenMeter:
    """Counter of tokens towards a total (or a time limit, whichever comes first) that shows the rate."""

    def __init__(self, line: ProgressLine, expected_tokens: int, limit_s: float | None = None) -> None:
        self.line, self.expected, self.limit_s = line, max(1, expected_tokens), limit_s
        self.tokens = 0

    def __call__(self, tokens: int) -> None:
        self.tokens += tokens
        rate = self.tokens / max(self.line.elapsed_s, 1e-6)
        timed = self.line.elapsed_s / self.limit_s if self.limit_s else 0.0
        fraction = min(1.0, max(self.tokens / self.expected, timed))
        self.line.update(fraction, f"{self.tokens} tokens, {rate:.0f}/s, at most {self.line.left(fraction)} left")
