"""Cost of logging for online adaptation: the same requests with no log, the default share, and all of them.

    python benchmarks/replay.py --prompts math.jsonl [--draft FOLDER] [--target smollm2] [--rounds 5]

Sides take turns. A ratio is the median of the rounds' ratios to serving without a log. Writes `results/replay.json`:
throughput by share, bytes a token on disk, and what was dropped.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from common import write_result
from sides import paired, read_prompts

from distillspec.config import DraftConfig, ReplayConfig, TargetConfig
from distillspec.models import LanguageModel, initialise_draft, load_target
from distillspec.models.draft import load_pretrained
from distillspec.serving import Engine, EngineSettings, Request, SamplingParams
from distillspec.serving.online.log.records import LogKey
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.log.tap import ReplayTap
from distillspec.serving.online.log.writer import LogWriter

GOALS = {"default share": 0.98, "all": 0.94}
BYTES_A_TOKEN = 512


@dataclass
class Side:
    """One share of requests, with a log of its own."""

    engine: Engine
    share: float
    folder: Path
    tap: ReplayTap | None = field(init=False, default=None)
    writer: LogWriter | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.share == 0:
            return
        config = ReplayConfig(share=self.share)
        replay = ReplayLog(self.folder, LogKey.of(self.engine.target.identity, config.entries), config)
        self.writer = LogWriter(replay)
        self.writer.start()
        self.tap = ReplayTap(config, self.writer.put, replay.clock)

    def serve(self, prompts: list[list[int]], tokens: int, ids: Callable[[], int]) -> int:
        """Answer all prompts and return the tokens written."""
        self.engine.observer = self.tap
        params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True)
        for prompt in prompts:
            self.engine.submit(Request(f"r{ids()}", tuple(prompt), params))
        written = 0
        while self.engine.has_work:
            output = self.engine.step()
            if self.tap is not None:
                self.tap.finish(output.finished)
            written += sum(len(delta.token_ids) for delta in output.deltas)
        return written

    def figures(self) -> dict[str, Any]:
        if self.tap is None or self.writer is None:
            return {}
        self.writer.flush()
        sizes = self.writer.replay.sizes()
        bytes_per_token = sizes["bytes"] / sizes["tokens"] if sizes["tokens"] else None
        return {**sizes, "bytes_per_token": bytes_per_token, **self.tap.counters, **self.writer.counters}


def main() -> None:
    options = _options()
    target = load_target(TargetConfig(path=options.target, dtype=options.dtype))
    draft = _draft(options, target)
    settings = EngineSettings(
        max_slots=options.batch,
        max_model_len=1024,
        controller="fixed",
        speculation_length=options.length,
        compile=False,
    )
    engine = Engine(target, draft, settings)
    prompts = (read_prompts(options.prompts, target, options.requests) * options.requests)[: options.requests]
    number = count()
    with tempfile.TemporaryDirectory() as folder:
        shares = {"all": 1.0, "default share": ReplayConfig().share, "none": 0.0}
        sides = {name: Side(engine, share, Path(folder) / name) for name, share in shares.items()}

        def call(name: str) -> Callable[[], int]:
            return lambda: sides[name].serve(prompts, options.tokens, lambda: next(number))

        timed = paired({name: call(name) for name in sides}, options.rounds, against="none")
        logs = {name: side.figures() for name, side in sides.items() if side.share}
        for side in sides.values():
            if side.writer is not None:
                side.writer.stop()
    bytes_per_token = logs["all"]["bytes_per_token"]
    met = {name: timed["ratios"][name] >= goal for name, goal in GOALS.items()}
    met["bytes"] = bytes_per_token <= BYTES_A_TOKEN
    spread = {name: statistics.stdev(side["rounds"]) / side["tokens_per_s"] for name, side in timed["sides"].items()}
    machine = {"dtype": str(target.dtype), "threads": torch.get_num_threads(), "batch": options.batch}
    write_result(
        "replay",
        {**machine, "tokens": options.tokens, **timed, "spread": spread, "logs": logs, "goals": GOALS, "met": met},
    )


def _draft(options: argparse.Namespace, target: LanguageModel) -> LanguageModel:
    """The given draft, or an untrained one: the log's cost does not depend on what is accepted."""
    if options.draft:
        return load_pretrained(options.draft, target, target.dtype)
    draft = initialise_draft(DraftConfig(layers=2), target)
    draft.model.to(target.dtype)
    return draft


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--length", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
