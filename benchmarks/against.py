"""This checkout against another one, in one paired run: the same tokens, and the time they take.

    python benchmarks/against.py --prompts math.jsonl --other ../before/.venv/bin/python [--rounds 5]

`--other` is the Python of an environment in which the other checkout is installed. Each side is one process that loads
SmolLM2 in float32 once. The sides take turns, and each round starts with the other one. Ratios are this side's time
over the other's, medians with a bootstrap interval. Greedy and seeded tokens must be equal.

The process that is launched first is about 2 % slower here, whichever code it runs. Run it the other way round too.
Writes `results/against.json`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MEASURES = ("plain", "seeded", "lookup", "controller", "training")
ROWS, TOKENS, CONTROLLER_STEPS = 8, 48, 400


def main() -> int:
    options = _options()
    if options.worker:
        Worker(options.prompts).serve()
        return 0
    with tempfile.TemporaryDirectory() as folder:
        sides = {"this": Side(sys.executable, options, folder), "other": Side(options.other, options, folder)}
        rounds = [_round(sides, number, options.measures) for number in range(options.rounds + 1)][1:]
        for side in sides.values():
            side.close()
    result = {name: _compare(name, rounds) for name in options.measures}
    _write({"rounds": options.rounds, "other_commit": _commit(options.other), "measures": result})
    return 0 if all(comparison["same_tokens"] for comparison in result.values()) else 1


class Worker:
    """Measures one thing for each line it reads, by interfaces that both checkouts have."""

    def __init__(self, prompts: str) -> None:
        from distillspec.serving import Engine

        rows = [json.loads(line)["prompt"] for line in Path(prompts).read_text().splitlines()[:ROWS]]
        settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_slots": ROWS, "max_model_len": 512}
        self.engines = {
            "plain": Engine.from_pretrained("smollm2", **settings),
            "lookup": Engine.from_pretrained("smollm2", proposer="prompt_lookup", **settings),
        }
        self.prompts = [self.engines["plain"].encode(row) for row in rows]

    def serve(self) -> None:
        measures: dict[str, Callable[[], dict[str, Any]]] = {
            "plain": lambda: self.generate("plain", temperature=0.0),
            "seeded": lambda: self.generate("plain", temperature=1.0, seed=7),
            "lookup": lambda: self.generate("lookup", temperature=0.0),
            "controller": self.control,
            "training": self.train,
        }
        print("ready", flush=True)
        for line in sys.stdin:
            print(json.dumps(measures[line.strip()]()), flush=True)

    def generate(self, engine: str, **params: Any) -> dict[str, Any]:
        from distillspec.serving import SamplingParams

        began = time.perf_counter()
        outputs = self.engines[engine].generate(
            self.prompts, SamplingParams(max_tokens=TOKENS, ignore_eos=True, **params)
        )
        seconds = time.perf_counter() - began
        tokens = [completion.token_ids for output in outputs for completion in output.completions]
        return {"seconds": seconds, "tokens": hashlib.sha256(json.dumps(tokens).encode()).hexdigest()}

    def control(self) -> dict[str, Any]:
        """Processor time of planning: a busy machine counts little."""
        from distillspec.serving.base.rows import BatchView, RowView
        from distillspec.serving.control.goodput import GoodputController
        from distillspec.serving.costs.latency import LatencyModel
        from distillspec.serving.costs.table import CostTable

        cost = LatencyModel(CostTable.line(1e-6, 1.5e-3, 4e-2), CostTable.line(1e-7, 2e-4, 5e-3))
        controller = GoodputController(6, cost)
        view = BatchView(tuple(RowView(f"r{row}", 200 + row, 6) for row in range(64)))
        began = time.thread_time()
        for _ in range(CONTROLLER_STEPS):
            controller.plan(view)
        return {"seconds": time.thread_time() - began}

    def train(self) -> dict[str, Any]:
        from distillspec.cli import main as distill

        with tempfile.TemporaryDirectory() as folder:
            words = ["train", "target=tiny", "draft.layers=1", "train.max_steps=60", "evaluation.measure_cost=false"]
            words += ["data.num_prompts=16", "data.eval_prompts=4", "data.max_new_tokens=32"]
            done = subprocess.run(
                [sys.executable, "-m", distill.__module__, *words, f"hydra.run.dir={folder}"],
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr
            summary = json.loads((Path(folder) / "summary.json").read_text())
        return {"seconds": 1.0 / summary["tokens_per_s"]}


class Side:
    """A worker of one checkout."""

    def __init__(self, python: str, options: argparse.Namespace, folder: str) -> None:
        command = [python, str(Path(__file__).resolve()), "--worker", "--prompts", str(Path(options.prompts).resolve())]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=folder
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._in, self._out = self.process.stdin, self.process.stdout
        while self._line() != "ready":
            pass

    def ask(self, measure: str) -> dict[str, Any]:
        print(measure, file=self._in, flush=True)
        while not (line := self._line()).startswith("{"):
            pass
        return json.loads(line)

    def close(self) -> None:
        self._in.close()
        self.process.wait(60)

    def _line(self) -> str:
        line = self._out.readline()
        if not line:
            raise RuntimeError(f"a worker ended with {self.process.wait(60)}")
        return line.strip()


def _round(sides: dict[str, Side], number: int, measures: Sequence[str]) -> dict[str, dict[str, dict[str, Any]]]:
    order = sorted(sides, reverse=bool(number % 2))
    return {measure: {name: sides[name].ask(measure) for name in order} for measure in measures}


def _compare(measure: str, rounds: list[dict[str, dict[str, dict[str, Any]]]]) -> dict[str, Any]:
    from distillspec.evaluation.bootstrap import median_interval

    ratios = [sides[measure]["this"]["seconds"] / sides[measure]["other"]["seconds"] for sides in rounds]
    middle = median_interval(ratios, 2000, 0)
    tokens = {side.get("tokens") for sides in rounds for side in sides[measure].values()}
    return {
        "time_ratio": {"median": middle.mean, "low": middle.low, "high": middle.high},
        "ratios": ratios,
        "same_tokens": len(tokens) == 1,
    }


def _commit(python: str) -> str:
    code = "from distillspec.provenance import provenance; print(provenance([], 0)['git_commit'])"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, cwd="/").stdout.strip()


def _write(result: dict[str, Any]) -> None:
    from common import write_result

    write_result("against", result)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--other", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measures", nargs="+", choices=MEASURES, default=MEASURES)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
