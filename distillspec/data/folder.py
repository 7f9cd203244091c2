"""Data folder: the prompts and their split, the training samples, and held-out answers.

prompts.jsonl      one prompt a line: id, split (train | held_out), domain, token_ids, response
turns.jsonl        prompts that the target is writing for itself, until all are in prompts.jsonl
samples/           shards of training samples (absent for purely on-policy runs)
held_out/<key>/    the target's answers to held-out prompts under one deployed policy
states/            the target's final hidden states on held-out answers, so that evaluations need not run it again
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from distillspec.data.prompts import PromptSet
from distillspec.errors import ConfigError
from distillspec.files import write_text
from distillspec.types import ModelIdentity, Prompt, SamplingPolicy

PROMPTS = "prompts.jsonl"
TURNS = "turns.jsonl"


class DataFolder:
    """Paths and prompts of one data folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def samples(self) -> Path:
        return self.root / "samples"

    @property
    def states(self) -> Path:
        return self.root / "states"

    @property
    def turns(self) -> Path:
        """Journal of an interrupted run that wrote its own prompts."""
        return self.root / TURNS

    def held_out(self, policy: SamplingPolicy, max_new_tokens: int, target: ModelIdentity | None = None) -> Path:
        """Return the folder of the answers under this policy and length. Each combination has its own.

        `target`: set where it is not the target that the folder was made for.
        """
        target_key = [] if target is None else [asdict(target)]
        key = json.dumps([asdict(policy), max_new_tokens, *target_key], sort_keys=True)
        return self.root / "held_out" / hashlib.sha256(key.encode()).hexdigest()[:12]

    @property
    def has_prompts(self) -> bool:
        return (self.root / PROMPTS).is_file()

    def write_prompts(self, prompts: PromptSet) -> None:
        """Write the prompts. The journal of those that the target wrote is not needed any more."""
        rows = [{"split": "train", **asdict(p)} for p in prompts.train]
        rows += [{"split": "held_out", **asdict(p)} for p in prompts.held_out]
        write_text(self.root / PROMPTS, "".join(json.dumps(row) + "\n" for row in rows))
        self.turns.unlink(missing_ok=True)

    def read_prompts(self) -> PromptSet:
        """Return the prompts as they were split when the folder was made.

        Raises:
            ConfigError: the folder has no prompts.
        """
        path = self.root / PROMPTS
        if not path.is_file():
            raise ConfigError(f"{self.root} is not a data folder: it has no {PROMPTS}; make one with distill generate")
        split: dict[str, list[Prompt]] = {"train": [], "held_out": []}
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            split[row["split"]].append(Prompt(row["id"], tuple(row["token_ids"]), row["domain"], row["response"]))
        return PromptSet(tuple(split["train"]), tuple(split["held_out"]))


def find_data_folder(path: str, key: str = "data.cache") -> DataFolder:
    """Return the data folder at `path`, or the one inside the run folder `path`.

    Args:
        key: the setting that names it.

    Raises:
        ConfigError: neither holds prompts.
    """
    for root in (Path(path), Path(path) / "data"):
        if (root / PROMPTS).is_file():
            return DataFolder(root)
    raise ConfigError(f"{key}={path} is not a data folder: it has no {PROMPTS}; make one with distill generate")
