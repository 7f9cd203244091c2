"""Settings of the study, and the files of its parts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distillspec.config import AdaptConfig
from distillspec.errors import ConfigError
from distillspec.files import read_object, write_json
from distillspec.serving.online.log.records import share_of

GROWING = ("fractions", "grid_losses", "grid_intervals")  # cells may be added to a study


@dataclass(frozen=True)
class Segment:
    """Part of the stream in one domain. A repeated domain continues in its file."""

    domain: str
    file: str


@dataclass(frozen=True)
class Study:
    """Settings of the stream and of all arms."""

    root: Path
    target: str
    draft: str  # the static draft: it serves while the stream is recorded, and every arm starts from it
    segments: tuple[Segment, ...]
    requests: int = 120  # a segment
    max_tokens: int = 128  # an answer
    max_prompt_tokens: int = 256
    slots: int = 8
    speculation_length: int = 2  # while recording and when outcomes are redrawn
    held_out: float = 0.2  # share of the requests that no arm learns from
    exam_requests: int = 16  # held-out requests of a segment that drafts are evaluated on
    loss: str = "jsd"
    learning_rate: float = AdaptConfig.learning_rate
    epochs: int = AdaptConfig.epochs
    batch_tokens: int = AdaptConfig.batch_tokens
    interval: int = 32  # requests between updates that mix new with old
    flush: int = 16  # requests of OSD's buffer
    fractions: tuple[float, ...] = (0.1, 0.2, 0.5, 1.0)
    grid_losses: tuple[str, ...] = ("fkl", "jsd", "lk")
    grid_intervals: tuple[int, ...] = (16, 48)
    grid_segment: int = 1
    seed: int = 0

    def holds_out(self, request_id: str) -> bool:
        """Return True for a request that no arm learns from."""
        return share_of(request_id, "held out") < self.held_out

    @property
    def stream(self) -> Path:
        """Online folder with the recorded log and the draft that served."""
        return self.root / "stream"

    @property
    def work(self) -> Path:
        """Temporary folders of running arms."""
        return self.root / "work"

    def part(self, name: str) -> Path:
        """File with the figures of one part."""
        return self.root / f"{name}.json"

    def finished(self, name: str) -> dict[str, Any]:
        """Read the figures of a part. Empty if there are none."""
        return read_object(self.part(name))

    def arm(self, name: str) -> Path:
        """File with the figures of one arm."""
        return self.root / "arms" / f"{name}.json"

    def settle(self) -> None:
        """Write the settings. Another study's folder is refused, since its parts would pass for this one's.

        Raises:
            ConfigError: the folder holds a study with other settings.
        """
        file, settings = self.part("study"), self.settings()
        if file.is_file():
            stored = json.loads(file.read_text())
            changed = [name for name, value in settings.items() if name not in GROWING and stored.get(name) != value]
            if changed:
                raise ConfigError(
                    f"--output {self.root} holds a study with another {changed[0]} ({stored.get(changed[0])}, not "
                    f"{settings[changed[0]]}); name another folder"
                )
        write_json(file, settings)

    def settings(self) -> dict[str, Any]:
        """Return the settings as JSON values, without the paths of this machine."""
        plain = {name: value for name, value in asdict(self).items() if name not in ("root", "draft", "segments")}
        return {**json.loads(json.dumps(plain)), "segments": [segment.domain for segment in self.segments]}


def parse_segments(words: Sequence[str]) -> tuple[Segment, ...]:
    """Parse `math=a.jsonl code=b.jsonl math` into three segments, the last in the first one's file.

    Raises:
        ConfigError: a file that is not there, or a domain without one.
    """
    files: dict[str, str] = {}
    segments = []
    for word in words:
        domain, _, file = word.partition("=")
        if file:
            if not Path(file).is_file():
                raise ConfigError(f"--segments {word}: no such file")
            files[domain] = file
        if domain not in files:
            raise ConfigError(
                f"--segments {word} names no file, and no earlier segment of this domain does; write {domain}=FILE"
            )
        segments.append(Segment(domain, files[domain]))
    return tuple(segments)
