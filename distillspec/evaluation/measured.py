"""Measured speed-up: speculative decoding against plain decoding, prompt by prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from distillspec.errors import ConfigError
from distillspec.evaluation.bootstrap import median_interval
from distillspec.evaluation.cost import timed
from distillspec.evaluation.reference import ReferenceOutput, plain_generate, speculative_generate
from distillspec.models.language_model import LanguageModel
from distillspec.types import Interval, SamplingPolicy


@dataclass(frozen=True)
class MeasuredSpeedup:
    """Speeds with reading the prompts. Ratios are medians over prompts, or groups of them, of paired tokens/s."""

    gamma: int  # the speculation length
    plain_tokens_per_s: float
    speculative_tokens_per_s: float
    ratio: Interval  # `mean` holds the median
    tau: float  # tokens a run of the target
    prompts: int | None = None  # how many were decoded each way, or groups of them
    served_tokens_per_s: float | None = None  # as a server decodes by default, if that was measured
    served: Interval | None = None  # its ratio; `mean` holds the median

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Run(NamedTuple):
    """Prompts decoded side by side: seconds, tokens of the answers, and runs of the target."""

    seconds: float
    tokens: int
    steps: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


T = TypeVar("T")
Prompt = Sequence[int]  # token ids
Decode = Callable[[Sequence[Prompt]], Run]


class Decoders(NamedTuple):
    """Ways to decode prompts side by side, for a comparison.

    `served` is what a server does by default. It learns from prompt to prompt, so it decodes none of them twice.
    """

    plain: Decode
    speculative: Decode
    served: Decode | None = None


class Decoding(NamedTuple):
    """Settings that all ways to decode share. At most `batch` prompts run at a time."""

    policy: SamplingPolicy
    speculation_length: int
    max_new_tokens: int
    seed: int
    batch: int


class MakeDecoders(Protocol):
    """Makes decoders, in a context that gives draft and target back."""

    def __call__(
        self, draft: LanguageModel, target: LanguageModel, how: Decoding
    ) -> AbstractContextManager[Decoders]: ...


@contextmanager
def reference_decoders(draft: LanguageModel, target: LanguageModel, how: Decoding) -> Iterator[Decoders]:
    """Yield the reference decoder, which decodes one prompt at a time by drafts that read tokens alone."""
    policy, length, max_new_tokens, seed, batch = how
    assert batch == 1

    def plain(prompts: Sequence[Prompt]) -> Run:
        (ids,) = prompts
        return _run(lambda: plain_generate(target, ids, policy, max_new_tokens, seed=seed), target)

    def speculative(prompts: Sequence[Prompt]) -> Run:
        (ids,) = prompts
        return _run(lambda: speculative_generate(draft, target, ids, policy, length, max_new_tokens, seed=seed), target)

    yield Decoders(plain, speculative)


def measure_speedup(
    draft: LanguageModel,
    target: LanguageModel,
    groups: Sequence[Sequence[Prompt]],
    policy: SamplingPolicy,
    speculation_length: int,
    max_new_tokens: int,
    *,
    bootstrap_samples: int = 1000,
    seed: int = 0,
    on_prompt: Callable[[int, int], None] | None = None,
    decoders: MakeDecoders = reference_decoders,
) -> MeasuredSpeedup:
    """Decode every group of prompts each way, one way right after the other. Each group begins with another way.

    Sampled responses differ in length, so speeds are compared, not times. `on_prompt` is called with `(done, total)`.

    Raises:
        ConfigError: there is no prompt.
    """
    if not groups:
        raise ConfigError("the measured speed-up needs at least one prompt; raise evaluation.speedup_prompts")
    how = Decoding(policy, speculation_length, max_new_tokens, seed, max(map(len, groups)))
    with decoders(draft, target, how) as all_ways:
        all_ways.speculative(groups[0])  # the first call pays for start-up work of both models
        ways = [way for way in all_ways if way is not None]
        runs: list[list[Run]] = [[] for _ in ways]
        for index, group in enumerate(groups):
            for way in in_turn(range(len(ways)), index):
                runs[way].append(ways[way](group))
            if on_prompt is not None:
                on_prompt(index + 1, len(groups))
    plain, fast, served = runs[0], runs[1], runs[2] if len(runs) > 2 else None

    def ratio(way_runs: Sequence[Run]) -> Interval:
        paired = [run.tokens_per_s / slow.tokens_per_s for run, slow in zip(way_runs, plain, strict=True)]
        return median_interval(paired, bootstrap_samples, seed)

    return MeasuredSpeedup(
        speculation_length,
        _overall(plain),
        _overall(fast),
        ratio(fast),
        sum(run.tokens for run in fast) / sum(run.steps for run in fast),
        len(plain),
        None if served is None else _overall(served),
        None if served is None else ratio(served),
    )


def grouped(prompts: Sequence[Prompt], batch: int, most: int) -> list[Sequence[Prompt]]:
    """Return at most so many groups of `batch` prompts each. No prompt occurs twice: a server learns from them.

    Where there are fewer prompts than that, all are one group.
    """
    whole = [prompts[start : start + batch] for start in range(0, len(prompts) - batch + 1, batch)]
    return (whole or [prompts])[:most] if prompts else []


def in_turn(sides: Iterable[T], round_: int) -> list[T]:
    """Return the sides of a round. Each round begins with another one: the machine's speed changes within it."""
    order = list(sides)
    first = round_ % len(order)
    return order[first:] + order[:first]


DECODERS: dict[str, MakeDecoders] = {"reference": reference_decoders}  # `distillspec.cli` adds the engine


def _run(decode: Callable[[], ReferenceOutput], target: LanguageModel) -> Run:
    seconds, output = timed(decode, target.device)
    return Run(seconds, len(output.token_ids), output.steps)


def _overall(runs: Sequence[Run]) -> float:
    """Return tokens a second over all runs."""
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)
