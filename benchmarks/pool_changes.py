"""Measure how soon several drafts in one engine follow a change, and what a switch between them costs.

    python benchmarks/pool_changes.py --prompts math.jsonl,sql.jsonl --drafts RUN_A/draft,RUN_B/draft

The draft that is faster alone is the one that changes. It begins spoilt, by noise in its weights. After `--before`
requests the sound draft is swapped in, and the engine is not told how good it is. Requests are counted until it is
used. After `--before` more it proposes wrong tokens, and the engine is not told. Requests are counted until it drafts
no more. Both changes are made `--times` times, one request at a time.

A change counts as followed where five answers in a row follow it. Answers in which nothing is drafted do not tell
whether a sound draft is used. If five answers in a row of the last twenty before a change looked as if it had been
followed, its requests do not count, since a draft that was not used cannot be left.

Then `--batch` answers to texts of `--context` tokens get another draft every 16 steps (`lbss`, which only explores).
Reading ahead of switches is on and off, by turns. Steps with a switch, and steps that read ahead, are timed as
multiples of a usual step of either side, which does neither. The memory of what drafts have read is measured too.
Writes `results/pool_changes.json`. The exit code is 1 if a goal is missed, or no change counts.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import count, cycle
from typing import Any

import numpy
from collapse import spoil
from common import Others, write_result
from sides import generate, greedy, make_engine, rate_of, read_prompts

from distillspec.config import TargetConfig
from distillspec.data.trained_prompts import trained_prompts
from distillspec.models import LanguageModel, load_target
from distillspec.models.memory import token_bytes
from distillspec.serving import Engine, Request
from distillspec.serving.base.tree import TokenTree
from distillspec.serving.baselines.by_name import named_controller
from distillspec.serving.draft_loading import draft_names, evaluated, load_draft, load_named
from distillspec.serving.proposers.base import ProposalRequest
from distillspec.serving.proposers.draft_model import DraftModel
from distillspec.serving.proposers.side_by_side import SideBySide
from distillspec.serving.selection.by_name import compared_selection
from distillspec.serving.selection.selecting import SelectingController

GOALS = {"swap_requests": 200, "collapse_requests": 30, "switch_p99": 1.2}
NUMBERS = count()  # of requests
IN_A_ROW, RECENT = 5, 20  # answers that follow a change, and those before it that must not look so
LENGTHS = "fixed-3"  # of steps with switches: every row drafts
EXPLORING = {"chunks": 10**6, "chunk": 16}

Texts = Iterator[list[int]]


def use(engine: Engine, selection: str, lengths: str = "goodput", **options: Any) -> SelectingController:
    """Let a new selection choose among the engine's drafts, and a controller their lengths."""
    inside = named_controller(lengths, engine.settings.speculation_length, engine.costs)
    expected, names = evaluated(engine.drafts), list(engine.drafts)
    controller = compared_selection(inside, selection, names, options, expected=expected, costs=engine.costs)
    engine.at_next_step(lambda: engine.use_controller(controller))
    return controller


def member(engine: Engine, name: str) -> DraftModel:
    """Return the proposer of a draft."""
    assert isinstance(engine.proposer, SideBySide)
    proposer = engine.proposer.proposers[name]
    assert isinstance(proposer, DraftModel)
    return proposer


def collapse(engine: Engine, name: str) -> None:
    """Let a draft propose wrong tokens from now on, in the same time."""
    broken, ids = member(engine, name), engine.target.identity.vocab_size
    propose = broken.propose

    def wrong(requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        return [
            TokenTree(
                tuple([(token + 1) % ids for token in tree.tokens]),
                tuple([group._replace(drawn_from=None) for group in tree.groups]),
            )
            for tree in propose(requests)
        ]

    broken.propose = wrong  # type: ignore[method-assign]


def served_by(engine: Engine, text: Sequence[int], tokens: int) -> str | None:
    """Answer a prompt. Return the draft that drafted most of its tokens, None if nothing was drafted."""
    drafted = Counter[str]()
    engine.submit(Request(f"follow-{next(NUMBERS)}", tuple(text), greedy(tokens)))
    while engine.has_work:
        result = engine.step().result
        for row in result.rows if result is not None else ():
            if row.nodes and result is not None and result.plan.chosen:
                drafted[str(result.plan.chosen[row.sequence_id])] += row.nodes
    return max(drafted, key=lambda name: drafted[name], default=None)


def requests_until(holds: Callable[[], bool | None], most: int) -> int | None:
    """Return the requests before the first `IN_A_ROW` in a row of which it holds, None if these are more than `most`.

    Requests of which it is None are passed over: nothing was drafted.
    """
    run: list[int] = []  # the newest requests of which it holds, all in a row
    for number in range(most + IN_A_ROW):
        holds_now = holds()
        run = [*run, number] if holds_now else run if holds_now is None else []
        if len(run) == IN_A_ROW:
            return run[0]
    return None


def counted(
    drafting: Callable[[], str | None],
    follows: Callable[[str | None], bool | None],
    change: Callable[[], object],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Make a change between requests. Return how many come before it is followed, and whether they count.

    Args:
        drafting: serves a request. Returns the draft that drafted for it.
        follows: True for a request that follows the change. None: it tells nothing.
        change: makes the change.
    """
    before = [drafting() for _ in range(options.before)]
    recent = [follows(by) for by in before[-RECENT:]]
    looked_so = requests_until(iter(recent).__next__, len(recent) - IN_A_ROW) is not None
    change()
    requests = requests_until(lambda: follows(drafting()), options.give_up)
    return {"before": Counter(map(str, before)), "requests": requests, "counts": not looked_so}


def follow(engine: Engine, name: str, sound: LanguageModel, bad: LanguageModel, texts: Texts, options: Any) -> Any:
    """Return the requests until a swap to the sound draft is used, and until it is left after a collapse."""
    engine.use_draft(bad, name=name)
    use(engine, "goodput")

    def drafting() -> str | None:
        return served_by(engine, next(texts), options.tokens)

    used = counted(
        drafting,
        lambda by: None if by is None else by == name,
        lambda: engine.use_draft(sound, name=name),
        options,
    )
    abandoned = counted(drafting, lambda by: by != name, lambda: collapse(engine, name), options)
    return {"swap": used, "collapse": abandoned}


def switch(engine: Engine, texts: Texts, options: argparse.Namespace) -> dict[str, Any]:
    """Return seconds of steps with a switch over a usual step, and bytes of what drafts have read, by side."""
    sides = {
        name: use(engine, "lbss", LENGTHS, **EXPLORING, fast_switching=name == "fast") for name in ("fast", "at once")
    }
    most_bytes = dict.fromkeys(sides, 0)
    for round_ in range(options.rounds):
        prompts = [_long(texts, options.context) for _ in range(options.batch)]
        for name, controller in sides.items():
            engine.use_controller(controller)
            for index, text in enumerate(prompts):
                engine.submit(Request(f"{name}-{round_}-{index}", tuple(text), greedy(options.tokens)))
            while engine.has_work:
                engine.step()
                most_bytes[name] = max(most_bytes[name], _read_bytes(engine))
    usual_s = [seconds for controller in sides.values() for seconds in controller.figures.usual_s]
    over = {
        name: {**_over_usual(controller, usual_s), "read_bytes": most_bytes[name]} for name, controller in sides.items()
    }
    typical_ms = 1e3 * float(numpy.median(usual_s)) if usual_s else None
    return {**over, "usual": {"ms": typical_ms, **_over(usual_s, usual_s)}}


def _long(texts: Texts, tokens: int) -> list[int]:
    """Return a text of so many tokens, of prompts one after another."""
    ids = list[int]()
    while len(ids) < tokens:
        ids += next(texts)
    return ids[-tokens:]


def _read_bytes(engine: Engine) -> int:
    """Return the bytes of the keys and values that drafts hold of running texts."""
    total = 0
    for name, draft in engine.drafts.items():
        states = [member(engine, name).state(sequence.id) for sequence in engine.sequences.running]
        total += sum(state.computed for state in states) * token_bytes([draft])
    return total


def _over_usual(controller: SelectingController, usual_s: Sequence[float]) -> dict[str, Any]:
    """Return steps with a switch, and those that read ahead, over the median of the usual ones of both sides."""
    return {**_over(controller.figures.switch_s, usual_s), "reading": _over(controller.figures.reading_s, usual_s)}


def _over(steps_s: Collection[float], usual_s: Sequence[float]) -> dict[str, Any]:
    if not steps_s or not usual_s:
        return {"steps": len(steps_s), "p50": None, "p99": None}
    p50, p99 = numpy.quantile(list(steps_s), (0.5, 0.99)) / numpy.median(usual_s)
    return {"steps": len(steps_s), "p50": float(p50), "p99": float(p99)}


def main() -> int:
    options = read_options()
    others, target = Others(), load_target(TargetConfig(path=options.target, dtype=options.dtype))
    paths = options.drafts.split(",")
    drafts = load_named(dict(zip(draft_names(paths), paths, strict=True)), target)
    engine = make_engine(options, target, drafts, options.batch, controller="goodput", max_model_len=options.longest)
    seen = frozenset[str]().union(*(trained_prompts(draft.lineage) for draft in drafts.values()))
    files = [read_prompts(name, target, 400, without=seen) for name in options.prompts.split(",")]
    texts = cycle([text for alike in zip(*files, strict=False) for text in alike])
    rates = dict[str, float]()
    for name in drafts:
        use(engine, name)
        rates[name] = rate_of(lambda: generate(engine, [next(texts) for _ in range(options.probe)], greedy()))
    best = max(rates, key=lambda name: rates[name])
    path = dict(zip(draft_names(paths), paths, strict=True))[best]
    times = []
    for number in range(options.times):
        bad = load_draft(path, target)
        spoil(bad, number)
        times.append(follow(engine, best, load_draft(path, target), bad, texts, options))
        print(times[-1], flush=True)
    engine.use_draft(load_draft(path, target), name=best)
    switches = switch(engine, texts, options)
    judged: dict[str, Any] = {
        f"{change}_requests": [repetition[change]["requests"] for repetition in times if repetition[change]["counts"]]
        for change in ("swap", "collapse")
    }
    judged["switch_p99"] = [switches["fast"]["p99"]]
    met = {
        name: bool(judged[name]) and all(value is not None and value <= goal for value in judged[name])
        for name, goal in GOALS.items()
    }
    setting = {name: getattr(options, name) for name in ("before", "batch", "context", "tokens", "rounds")}
    result = {**setting, "alone": rates, "changes": best, "times": times, "switches": switches, **judged}
    write_result("pool_changes", {**result, "goals": GOALS, "met": met, "others_cores": others.cores()})
    return 0 if all(met.values()) else 1


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, help="JSONL files, A,B")
    parser.add_argument("--drafts", required=True, help="draft folders, A,B")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--before", type=int, default=100, help="requests before each change")
    parser.add_argument("--give-up", type=int, default=300, help="requests after a change that is not followed")
    parser.add_argument("--probe", type=int, default=12, help="answers of each draft alone")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--batch", type=int, default=4, help="rows of the steps with switches")
    parser.add_argument("--context", type=int, default=600, help="tokens of their prompts")
    parser.add_argument("--rounds", type=int, default=6, help="of them")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of prompt and answer")
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
