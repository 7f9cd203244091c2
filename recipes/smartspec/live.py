"""Figs. 15 and 16 live: Poisson loads on the engine, with fixed shapes, and with chains and trees by goodput."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from distillspec.config import TargetConfig
from distillspec.files import write_json, write_text
from distillspec.models import load_target
from distillspec.progress import progress
from distillspec.provenance import provenance
from distillspec.recipes.kinds.results import interval_cell
from distillspec.recipes.unseen import unseen_prompts
from distillspec.serving import Engine, EngineSettings, SamplingParams
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.baselines.by_name import named_controller
from distillspec.serving.baselines.tree_names import tree_settings
from distillspec.serving.bench.compare import speed_ratio
from distillspec.serving.bench.drive import drive
from distillspec.serving.bench.load import Arrival, poisson_load
from distillspec.serving.bench.records import LoadRecord
from distillspec.serving.bench.rounds import Side, figures, take_turns, write_records
from distillspec.serving.draft_loading import load_draft
from distillspec.serving.proposers.by_name import use_trees
from distillspec.types import Prompt

NONE, CHAINS, TREES = "none", "goodput-chains", "goodput"
FIXED = ("fixed-1", "fixed-2", "fixed-4", "siblings-3-2", "tree-2-2")
LONGEST = 4  # levels, of fixed shapes and of those by goodput
LONGEST_PROMPT = 256  # tokens


@dataclass(frozen=True)
class LiveLoads:
    """Settings.

    Attributes:
        fixed: shapes to choose the best of, as policies of `distill bench` name them.
        loads: requests a second, as shares of what the engine answers without a draft when all slots are busy.
        rounds: of each load, two at least: the best shape is chosen on the odd ones and compared on the even ones.
        seconds: of arrivals in a round.
        count: prompts, none that the draft was trained on.
        tokens: of an answer.
    """

    prompts: str
    draft: str
    target: str = "smollm2"
    tree: str = "sampled"
    fixed: Sequence[str] = FIXED
    loads: Sequence[float] = (0.3, 0.6, 0.9, 1.2)
    rounds: int = 4
    seconds: float = 20.0
    slots: int = 8
    count: int = 64
    tokens: int = 64
    temperature: float = 0.0
    seed: int = 0

    def run(self, folder: Path) -> str:
        """Write `live.json`, `live.md`, `requests.json` and `load.png`. Return the table."""
        target = load_target(TargetConfig(path=self.target))
        draft = load_draft(self.draft, target)
        texts = unseen_prompts(self.prompts, target, [draft], self.count, LONGEST_PROMPT)
        prompts = [Prompt(str(index), ids) for index, ids in enumerate(texts)]
        settings = EngineSettings(
            max_slots=self.slots,
            max_model_len=LONGEST_PROMPT + self.tokens + 8,
            speculation_length=LONGEST,
            prefix_reuse=False,
            compile=False,
            proposer="draft_model",
            tree=self.tree,
        )
        engine = Engine(target, draft, settings)
        try:
            sides = {name: _side(engine, name) for name in (NONE, *self.fixed, CHAINS, TREES)}
            capacity = self._capacity(engine, prompts)
            rates = {share * capacity: share for share in self.loads}
            records = take_turns(sides, list(rates), self.rounds, partial(self._load, prompts))
        finally:
            engine.close()
        folder.mkdir(parents=True, exist_ok=True)
        write_records(records, figures(records), "policy", folder)
        loads = {f"{rates[rate]:g}": {"rate": rate, **self._judged(by_policy)} for rate, by_policy in records.items()}
        about = {"draft": draft.kind, "capacity_requests_per_s": capacity, "provenance": provenance([], self.seed)}
        study_settings = {**asdict(self), "prompts": Path(self.prompts).name, "draft": Path(self.draft).name}
        write_json(folder / "live.json", {"settings": study_settings, "loads": loads, **about})
        text = _table(loads)
        write_text(folder / "live.md", text)
        return text

    def _capacity(self, engine: Engine, prompts: Sequence[Prompt]) -> float:
        """Return the requests a second that the engine answers with all slots busy and nothing drafted."""
        engine.use_controller(FixedLength(0))
        prompt_ids = [prompts[i % len(prompts)].token_ids for i in range(2 * self.slots)]
        engine.generate(prompt_ids[: self.slots], self._params)  # warms up
        started_s = engine.clock()
        engine.generate(prompt_ids, self._params)
        return len(prompt_ids) / (engine.clock() - started_s)

    def _load(self, prompts: Sequence[Prompt], rate: float, round_: int) -> list[Arrival[Prompt]]:
        return poisson_load(prompts, self._params, rate, self.seconds, self.seed + round_)

    @property
    def _params(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, max_tokens=self.tokens, ignore_eos=True)

    def _judged(self, records: dict[str, list[LoadRecord]]) -> dict[str, Any]:
        """Return mean latencies, and how many times as fast trees are."""
        best = min((NONE, *self.fixed), key=lambda name: _latency_s(records[name][::2]))
        even = {name: rounds[1::2] for name, rounds in records.items()}
        return {
            "latency_s": {name: _latency_s(rounds) for name, rounds in records.items()},
            "best_fixed": best,
            "trees_over_best_fixed": asdict(speed_ratio(even, TREES, best).value),
            **{f"trees_over_{name}": asdict(speed_ratio(records, TREES, name).value) for name in (NONE, CHAINS)},
        }


def _side(engine: Engine, name: str) -> Side[Prompt]:
    controller = named_controller(name, LONGEST, engine.costs, settings=engine.settings)
    trees = tree_settings(name, engine.settings) or engine.settings

    def answer_load(arrivals: Sequence[Arrival[Prompt]], title: str) -> LoadRecord:
        engine.use_controller(controller)
        use_trees(engine.proposer, trees)
        with progress(title) as line:
            return drive(engine, arrivals, on_progress=lambda done: line.update(done / len(arrivals), f"{done} done"))

    return answer_load


def _latency_s(rounds: Sequence[LoadRecord]) -> float:
    return statistics.fmean([request.latency_s for record in rounds for request in record.requests])


def _table(loads: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| load | none, s | best fixed shape | chains by goodput, s | trees, s | × best fixed | × chains | × none |",
        f"|{'---|' * 8}",
    ]
    for share, load in loads.items():
        mean, best = load["latency_s"], load["best_fixed"]
        seconds = [f"{mean[NONE]:.2f}", f"{best}, {mean[best]:.2f} s", f"{mean[CHAINS]:.2f}", f"{mean[TREES]:.2f}"]
        ratios = [interval_cell(load[f"trees_over_{name}"]) for name in ("best_fixed", CHAINS, NONE)]
        lines.append(f"| {' | '.join([share, *seconds, *ratios])} |")
    return "\n".join(lines) + "\n"
