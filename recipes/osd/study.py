"""What the study is told, and where its parts lie on disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distillspec.errors import ConfigError
from distillspec.files import read_object, write_json

GROWING = ("fractions", "grid_losses", "grid_intervals")  # cells may be added to a study


@dataclass(frozen=True)
class Segment:
    """A stretch of the stream in one domain; a domain that comes again goes on in its file."""

    domain: str
    file: str


@dataclass(frozen=True)
class Study:
    """The stream, and what all arms have in common."""

    root: Path
    target: str
    draft: str  # the static draft: what serves while the stream is recorded, and where every arm starts
    segments: tuple[Segment, ...]
    requests: int = 120  # a segment
    max_tokens: int = 128  # an answer
    max_prompt_tokens: int = 256
    slots: int = 8
    gamma: int = 2  # speculation length while recording, and when outcomes are drawn anew
    held_out: float = 0.2
    exam_requests: int = 16  # held-out requests of a segment that are scored again by the target
    loss: str = "jsd"
    learning_rate: float = 5e-4
    epochs: int = 2
    batch_tokens: int = 512
    interval: int = 32  # requests between updates that mix new with old
    flush: int = 16  # requests of OSD's buffer
    fractions: tuple[float, ...] = (0.1, 0.2, 0.5, 1.0)
    grid_losses: tuple[str, ...] = ("fkl", "jsd", "lk")
    grid_intervals: tuple[int, ...] = (16, 48)
    grid_segment: int = 1
    seed: int = 0

    @property
    def stream(self) -> Path:
        """An online folder: the recorded log and the draft that served."""
        return self.root / "stream"

    @property
    def work(self) -> Path:
        """Folders of arms under way; nothing there is needed again."""
        return self.root / "work"

    def part(self, name: str) -> Path:
        """The figures of one part."""
        return self.root / f"{name}.json"

    def finished(self, name: str) -> dict[str, Any]:
        """What an earlier run left of a part; empty where there is nothing."""
        return read_object(self.part(name))

    def arm(self, name: str) -> Path:
        """The figures of one arm."""
        return self.root / "arms" / f"{name}.json"

    def settle(self) -> None:
        """Remember the settings; another study's folder is refused, since its parts would be taken for this one's.

        Raises:
            ConfigError: the folder holds a study with other settings.
        """
        file, own = self.part("study"), self.settings()
        if file.is_file():
            found = json.loads(file.read_text())
            changed = [name for name, value in own.items() if name not in GROWING and found.get(name) != value]
            if changed:
                raise ConfigError(
                    f"--output {self.root} holds a study with another {changed[0]} ({found.get(changed[0])}, not "
                    f"{own[changed[0]]}); name another folder"
                )
        write_json(file, own)

    def settings(self) -> dict[str, Any]:
        """As JSON holds them, without the paths of one machine."""
        plain = {name: value for name, value in asdict(self).items() if name not in ("root", "draft", "segments")}
        return {**json.loads(json.dumps(plain)), "segments": [segment.domain for segment in self.segments]}


def parse_segments(words: Sequence[str]) -> tuple[Segment, ...]:
    """`math=a.jsonl code=b.jsonl math` → three segments, the last in the first one's file.

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
            raise ConfigError(f"--segments {word} names no file, and none before it did; write {domain}=FILE")
        segments.append(Segment(domain, files[domain]))
    return tuple(segments)
