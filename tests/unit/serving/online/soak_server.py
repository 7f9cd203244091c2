"""A serving process of the soak test: answers requests FIRST, … until SIGTERM and tells what is on disk.

python soak_server.py FOLDER FIRST
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch

from distillspec.config import AdaptConfig, DraftConfig, GateConfig, OnlineConfig, ReplayConfig, TargetConfig
from distillspec.models import initialise_draft, load_target, save_draft
from distillspec.models.draft import load_pretrained
from distillspec.serving import Engine, EngineSettings, Request, SamplingParams
from distillspec.serving.online.adaptation import Adaptation, first_draft
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.training.interrupts import listen_for_stop

LOT = 32


def settings_of(folder: Path) -> OnlineSettings:
    return OnlineSettings(
        OnlineConfig(mode="on", folder=str(folder / "online"), metrics_s=5.0),
        ReplayConfig(share=1.0, entries=16, shard_positions=2000, max_mib=4096.0),
        AdaptConfig(every_requests=200, max_steps=30, epochs=4, learning_rate=2e-3, niceness=0, busy_share=1.0),
        GateConfig(requests=24, min_requests=8, rollback_requests=16, bootstrap_samples=200),
        target=TargetConfig(path="tiny", dtype="float32", device="cpu"),
    )


def main(folder: Path, first: int) -> None:
    settings = settings_of(folder)
    target = load_target(TargetConfig(path="tiny", dtype="float32", device="cpu"))
    given = folder / "given"
    if not given.is_dir():
        save_draft(initialise_draft(DraftConfig(layers=2), target), given, target)
    path = first_draft(settings, target, given)
    engine = Engine(
        target,
        load_pretrained(str(path), target, target.dtype),
        # Goodput would price updates by the times of this machine's steps: whether one pays were luck on a busy one.
        EngineSettings(max_slots=16, max_model_len=64, compile=False, measure_costs_s=0, controller="fixed"),
    )
    with listen_for_stop() as stop, Adaptation(engine, settings) as adaptation:
        print(f"serving {path.name}", flush=True)
        for start in itertools.count(first, LOT):
            if stop.requested:
                break
            _serve(engine, adaptation, range(start, start + LOT))
            adaptation.writer.flush()
            print(f"acknowledged {start + LOT}", flush=True)  # all before it are on disk


def _serve(engine: Engine, adaptation: Adaptation, numbers: range) -> None:
    for number in numbers:
        prompt = torch.randint(3, 250, (6,), generator=torch.Generator().manual_seed(number)).tolist()
        params = SamplingParams(max_tokens=12, ignore_eos=True, seed=number)
        engine.submit(Request(f"r{number}", tuple(prompt), params))
    while engine.has_work:
        output = engine.step()
        adaptation.on_step(output)
        for finished in output.finished:
            if finished.finish_reason != "length":
                raise RuntimeError(f"{finished.request_id} ended with {finished.finish_reason}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
