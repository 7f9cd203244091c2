"""`python -m distillspec.recipes.trees.room --prompts FILE --draft RUN`: what a perfect decision would still earn.

After the oracle of multi-candidate decoding (Lu et al. 2024): each shape as it is, and cut at every step to the levels
that will be accepted (`foreseen.py`). The sides answer the same prompts by turns, alone and together.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distillspec.config import TargetConfig
from distillspec.evaluation.measured import in_turn
from distillspec.models import load_target
from distillspec.progress import progress
from distillspec.recipes.arguments import add_common, check_prompts
from distillspec.recipes.trees.foreseen import AcceptedCounts, Foreseen
from distillspec.recipes.trees.room_results import GOODPUT, NONE, chain, cut, write_room
from distillspec.recipes.unseen import unseen_prompts
from distillspec.serving import Engine, EngineSettings, Request, SamplingParams
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.fixed import FixedLength, FixedTree
from distillspec.serving.base.shape import TreeShape, chain_shape
from distillspec.serving.baselines.by_name import named_controller
from distillspec.serving.draft_loading import load_draft

LONGEST = 256  # tokens of a prompt
FIXED = (1, 2, 3, 4, 5, 6)
LONG = 8  # tokens of the chain that is cut: more than any worth drafting always
FORKS = ((2, 4), (4, 2), (4, 4), (16, 5))  # branches, and tokens of each
GIVEN = (4, 2, 2, 1)


def fork(branches: int, levels: int) -> TreeShape:
    """Return so many chains side by side, apart from the first token on."""
    return TreeShape(((branches,), *[(1,) * branches] * (levels - 1)))


SHAPES: dict[str, TreeShape] = {
    chain(LONG): chain_shape(LONG),
    **{f"fork {branches} × {levels}": fork(branches, levels) for branches, levels in FORKS},
    f"tree {GIVEN}": TreeShape.full(GIVEN),
}


@dataclass(frozen=True)
class Room:
    """Settings.

    Attributes:
        rounds: in each as many prompts are answered as the batch has rows.
        tokens: of an answer.
    """

    prompts: str
    draft: str
    target: str
    batches: Sequence[int]
    temperatures: Sequence[float]
    rounds: int
    tokens: int
    dtype: str = "auto"

    def run(self) -> list[dict[str, Any]]:
        """Return tokens a second and a step of each side, by batch, temperature and round."""
        return [
            {"batch": batch, "temperature": temperature, **self._sides(batch, temperature)}
            for batch in self.batches
            for temperature in self.temperatures
        ]

    def _sides(self, batch: int, temperature: float) -> dict[str, Any]:
        with self._engine(batch) as (engine, prompts), progress(f"batch {batch}, T = {temperature}") as line:
            chosen = named_controller("goodput-chains", LONG, engine.costs)
            sides: dict[str, LengthController] = {
                **{chain(length): FixedLength(length) for length in FIXED},
                NONE: FixedLength(0),
                GOODPUT: chosen,
                **{name: FixedTree(shape) for name, shape in SHAPES.items()},
            }
            timings: dict[str, list[tuple[float, float]]] = {}
            for round_ in range(self.rounds):
                texts = prompts[round_ * batch : (round_ + 1) * batch]
                foreseen = {}
                for name, shape in SHAPES.items():  # not timed: tells the oracle which tokens are accepted
                    accepted = AcceptedCounts()
                    self._answer(engine, sides[name], texts, temperature, round_, accepted)
                    foreseen[cut(name)] = Foreseen(shape, accepted)
                all_sides = {**sides, **foreseen}
                for index, (name, side) in enumerate(in_turn(list(all_sides.items()), round_)):
                    line.update((round_ + index / len(all_sides)) / self.rounds, name)
                    timings.setdefault(name, []).append(self._answer(engine, side, texts, temperature, round_))
        return {
            "tokens_per_s": {name: [rate for rate, _ in rounds] for name, rounds in timings.items()},
            "tokens_per_step": {name: [length for _, length in rounds] for name, rounds in timings.items()},
            "depths": {name: shape.depth for name, shape in SHAPES.items()},
        }

    @contextmanager
    def _engine(self, batch: int) -> Iterator[tuple[Engine, list[tuple[int, ...]]]]:
        """Yield an engine, and prompts that its draft has not seen."""
        target = load_target(TargetConfig(path=self.target, dtype=self.dtype))
        draft = load_draft(self.draft, target)
        settings = EngineSettings(
            max_slots=batch,
            max_model_len=1024,
            prefix_reuse=False,
            compile=False,
            proposer="draft_model",
            speculation_length=LONG,
        )
        prompts = unseen_prompts(self.prompts, target, [draft], batch * self.rounds, LONGEST)
        engine = Engine(target, draft, settings)
        try:
            yield engine, prompts
        finally:
            engine.close()

    def _answer(
        self,
        engine: Engine,
        side: LengthController,
        texts: Sequence[tuple[int, ...]],
        temperature: float,
        round_: int,
        accepted: AcceptedCounts | None = None,
    ) -> tuple[float, float]:
        """Answer prompts together. Return tokens a second, and a step and row, of steps in which all of them decode."""
        engine.use_controller(side)
        for row, ids in enumerate(texts):
            params = SamplingParams(
                temperature=temperature, max_tokens=self.tokens, ignore_eos=True, seed=round_ * len(texts) + row
            )
            engine.submit(Request(str(row), ids, params))
        tokens = steps = 0
        seconds = 0.0
        while engine.has_work:
            all_decode = len(engine.sequences.decoding) == len(texts)
            started = time.perf_counter()
            output = engine.step()
            if accepted is not None and output.result is not None:
                accepted.learn(output.result)
            if all_decode:
                seconds += time.perf_counter() - started
                tokens += sum(len(delta.token_ids) for delta in output.deltas)
                steps += 1
        return tokens / seconds, tokens / steps / len(texts)


def main() -> int:
    room, output = _room()
    print(write_room(room.run(), _about(room), output), flush=True)
    return 0


def _about(room: Room) -> Mapping[str, Any]:
    return {"target": room.target, "rounds": room.rounds, "tokens": room.tokens, "prompts": Path(room.prompts).name}


def _room() -> tuple[Room, Path]:
    parser = argparse.ArgumentParser(prog="python -m distillspec.recipes.trees.room", description=__doc__)
    add_common(parser, "runs/study/trees")
    parser.add_argument("--draft", required=True, help="a run or folder with a draft")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--dtype", default="auto", help="of target and draft; in float32 the oracle seldom errs")
    options = parser.parse_args()
    check_prompts(parser, options.prompts)
    if options.words:
        parser.error(f"{options.words[0]}: the room is measured in one process, without further settings")
    room = Room(
        prompts=options.prompts,
        draft=options.draft,
        target=options.target,
        batches=options.batches,
        temperatures=options.temperatures,
        rounds=options.rounds,
        tokens=options.tokens,
        dtype=options.dtype,
    )
    return room, Path(options.output)


if __name__ == "__main__":
    sys.exit(main())
