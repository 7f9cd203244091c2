"""Models small enough to enumerate, and the tiny transformers pair, shared by the evaluation tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from distillspec.config import DraftConfig, TargetConfig
from distillspec.evaluation import EvaluationResult, MeasuredSpeedup, StepCost, plain_generate, predict_speedup
from distillspec.models import LanguageModel, initialise_draft, load_target
from distillspec.types import Interval, ModelIdentity, OutputHead, Sample, SamplingPolicy


@dataclass(frozen=True)
class MarkovModel(LanguageModel):
    """A `LanguageModel` whose next token depends on the last one alone: `table [V, V]` holds its logits."""

    table: Tensor = None  # type: ignore[assignment]
    stops: tuple[int, ...] = ()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.stops

    @property
    def head(self) -> OutputHead:
        columns = slice(None) if self.kept_ids is None else self.kept_ids
        # 0 × −inf is NaN in the product with a one-hot row, so a zero probability is e^−1e4 here.
        return OutputHead(self.table[:, columns].T.clamp(min=-1e4))

    def hidden(self, input_ids: Tensor, position_ids: Tensor, **kwargs: Any) -> Tensor:
        return nn.functional.one_hot(input_ids, self.identity.vocab_size).float()

    @property
    def decoder(self) -> Callable[..., SimpleNamespace]:  # type: ignore[override]
        def run(input_ids: Tensor, past_key_values: DynamicCache, **kwargs: Any) -> SimpleNamespace:
            nothing = torch.zeros(len(input_ids), 1, input_ids.shape[1], 1)
            past_key_values.update(nothing, nothing, 0)
            return SimpleNamespace(last_hidden_state=self.hidden(input_ids, input_ids))

        return run


MakeMarkov = Callable[..., MarkovModel]


@pytest.fixture
def markov() -> MakeMarkov:
    """`markov(logits [V, V], kept_ids=None, stops=())`."""

    def make(table: Tensor, kept_ids: Tensor | None = None, stops: tuple[int, ...] = ()) -> MarkovModel:
        identity = ModelIdentity("toy", table.shape[0])
        return MarkovModel(nn.Module(), None, identity, "toy", kept_ids, table=table.float(), stops=stops)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def target() -> LanguageModel:
    return load_target(TargetConfig(path="tiny", dtype="float32", device="cpu"))


@pytest.fixture(scope="session")
def draft(target: LanguageModel) -> LanguageModel:
    """Three of the target's four layers, whole vocabulary."""
    return initialise_draft(DraftConfig(kind="pruned", keep=[0, 1, 3]), target)


@pytest.fixture(scope="session")
def truncated_draft(target: LanguageModel) -> LanguageModel:
    """The same with two thirds of the vocabulary, the stop token among them."""
    size = target.identity.vocab_size
    kept_ids = torch.tensor([i for i in range(size) if i % 3 != 1])
    return initialise_draft(DraftConfig(kind="pruned", keep=[0, 1, 3]), target, kept_ids=kept_ids)


@pytest.fixture(scope="session")
def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(3, 250, (6,), generator=generator).tolist()) for _ in range(16)]


@pytest.fixture(scope="session")
def samples(target: LanguageModel, prompts: list[tuple[int, ...]]) -> list[Sample]:
    """Twenty tokens a prompt, sampled from the target at temperature 1, in two domains by turns."""
    policy, out = SamplingPolicy(), []
    for i, ids in enumerate(prompts):
        text = plain_generate(target, ids, policy, 20, seed=i)
        domain = "odd" if i % 2 else "even"
        out.append(Sample(f"p{i}", domain, ids, text.token_ids, source="teacher", finished=text.finished))
    return out


@pytest.fixture
def result() -> EvaluationResult:
    cost = StepCost(1, 0.1, (1.0, 1.1, 1.2))
    return EvaluationResult(
        draft="runs/a/draft",
        policy=SamplingPolicy(0.8, top_p=0.9),
        prompts=4,
        positions=100,
        alpha=Interval(0.51, 0.47, 0.55),
        alpha_by_domain={"math": Interval(0.51, 0.47, 0.55)},
        greedy_agreement=Interval(0.6, 0.5, 0.7),
        p_of_draft_argmax=Interval(0.4, 0.3, 0.5),
        ceiling=Interval(0.97, 0.96, 0.98),
        tau=(Interval(1.5, 1.4, 1.6), Interval(1.9, 1.7, 2.0)),
        cost={1: cost},
        speedup={1: predict_speedup([1.5, 1.9], cost)},
        measured=MeasuredSpeedup(2, 20.0, 26.0, Interval(1.3, 1.2, 1.4), 1.88),
    )
