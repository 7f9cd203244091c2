"""Drafts judged by the log beside the target's whole distributions, on the same answers.

    python benchmarks/judging.py --prompts sql.jsonl --draft RUN/draft [--answers 64] [--policies plain cooler top-p]

The engine writes and logs answers. Then the draft is scored on each of them by what the log holds, without a pass of
the target, and by the target, which reads the answer again. α and τ of both must agree within the interval over
answers. Their spread, and the seconds of both, say what the target's pass buys. Writes `results/judging.json`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from common import write_result
from sides import make_engine, read_prompts

from distillspec.config import ReplayConfig, TargetConfig
from distillspec.evaluation.bootstrap import paired_difference
from distillspec.evaluation.states import TargetStates
from distillspec.models import LanguageModel, load_target
from distillspec.serving import Engine, Request, SamplingParams
from distillspec.serving.draft_loading import load_draft
from distillspec.serving.online.judging.logged_score import logged_score, target_score
from distillspec.serving.online.judging.score import Score
from distillspec.serving.online.log.records import LoggedAnswer
from distillspec.serving.online.log.tap import ReplayTap

POLICIES: dict[str, dict[str, float]] = {
    "plain": {"temperature": 1.0},
    "cooler": {"temperature": 0.7},
    "top-p": {"temperature": 0.7, "top_p": 0.9},
    "greedy": {"temperature": 0.0},
}
LENGTH, TOKENS = 3, 128  # of τ, and of an answer
RESAMPLES = 1000


def main() -> None:
    options = _options()
    target = load_target(TargetConfig(path=options.target, dtype=options.dtype))
    draft = load_draft(options.draft, target)
    engine = make_engine(options, target, draft, 8, speculation_length=LENGTH)
    prompts = read_prompts(options.prompts, target, options.answers)
    by_policy = {}
    policies = {name: SamplingParams(**POLICIES[name], max_tokens=TOKENS) for name in options.policies}  # type: ignore[arg-type]
    answers = {name: _written(engine, prompts, params) for name, params in policies.items()}
    engine.close()  # the target is as it was before the engine
    for name, policy_answers in answers.items():
        by_policy[name] = _compared(draft, target, policy_answers)
        print(f"{name}: {by_policy[name]}", flush=True)
    setting = {"dtype": str(target.dtype), "threads": torch.get_num_threads(), "draft": draft.kind, "tau_at": LENGTH}
    write_result("judging", {**setting, "policies": by_policy})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.set_defaults(compile=False)
    return parser.parse_args()


def _written(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[LoggedAnswer]:
    """Answer all prompts, and return what the tap logs of them."""
    logged: list[LoggedAnswer] = []

    def queue(answer: LoggedAnswer) -> bool:
        logged.append(answer)
        return True

    tap = ReplayTap(ReplayConfig(share=1.0), queue, time.time)
    engine.observer = tap
    for number, prompt in enumerate(prompts):
        engine.submit(Request(f"{params.temperature}-{params.top_p}-{number}", tuple(prompt), params))
    while engine.has_work:
        tap.finish(engine.step().finished)
    engine.observer = None
    return [answer for answer in logged if answer.response_ids]


def _compared(draft: LanguageModel, target: LanguageModel, answers: Sequence[LoggedAnswer]) -> dict[str, Any]:
    by_log, log_s = _timed(
        [lambda answer=answer: logged_score(draft, answer, TargetStates(target), LENGTH) for answer in answers]
    )
    by_target, target_s = _timed(
        [lambda answer=answer: target_score(draft, answer, TargetStates(target), LENGTH) for answer in answers]
    )
    tokens = sum(len(answer) for answer in answers)
    return {
        "answers": len(answers),
        "tokens": tokens,
        "positions_known": sum(score.positions for score in by_log) / tokens,
        "alpha": _side_by_side(
            [(score.alpha, score.positions) for score in by_log],
            [(score.alpha, score.positions) for score in by_target],
        ),
        "tau": _side_by_side(
            [(score.tokens[-1], score.blocks[-1]) for score in by_log],
            [(score.tokens[-1], score.blocks[-1]) for score in by_target],
        ),
        "ms_an_answer": {"log": 1e3 * log_s, "target": 1e3 * target_s},
    }


def _timed(calls: Sequence[Any]) -> tuple[list[Score], float]:
    """Return the scores, and the median seconds of one."""
    scores, seconds = [], []
    for call in calls:
        started = time.perf_counter()
        scores.append(call())
        seconds.append(time.perf_counter() - started)
    return scores, statistics.median(seconds)


def _side_by_side(by_log: list[tuple[float, int]], by_target: list[tuple[float, int]]) -> dict[str, Any]:
    """Return both ratios, their difference with its interval, and the standard deviation over answers of both."""
    sides = [numpy.array(side, dtype=numpy.float64).T for side in (by_target, by_log)]
    difference = paired_difference((sides[0][0], sides[0][1]), (sides[1][0], sides[1][1]), RESAMPLES, 0)
    spread = [float(numpy.std(above[below > 0] / below[below > 0], ddof=1)) for above, below in sides]
    return {
        "log": float(sides[1][0].sum() / sides[1][1].sum()),
        "target": float(sides[0][0].sum() / sides[0][1].sum()),
        "difference": {"mean": difference.mean, "low": difference.low, "high": difference.high},
        "spread": {"log": spread[1], "target": spread[0]},
    }


if __name__ == "__main__":
    main()
