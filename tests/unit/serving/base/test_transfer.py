"""One read of the device a step: everything else a step does with tensors is launched and left alone.

There is no accelerator here, so every tensor counts as one of the device's but those that `to_host` returned, and the
sampler is told that device reads are not free, as on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from distillspec.models import LanguageModel
from distillspec.serving import Engine, Request, SamplingParams
from distillspec.serving.base.tree import LOOKUP, ROOT, DraftProbs, SiblingGroup, TokenTree
from distillspec.serving.decoding import sampling
from distillspec.serving.decoding.sampling import TokenSampler
from distillspec.serving.proposers import draft_model
from distillspec.serving.proposers.base import ProposalRequest, Proposer

from ..conftest import MakeEngine, prompts

DEVICE: dict[str, Any] = {
    "attention": "masked"
}  # CPUs have a kernel of their own, which looks at positions for nothing
READING_METHODS = {"tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__"}
READING_KERNELS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim"}


class Reads(TorchFunctionMode):
    """Counts reads through `to_host`, and every other way there is to look at a tensor's numbers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.through_the_door = 0
        self.others: list[str] = []
        self.kernels = _Kernels(self)
        self._inside = False
        self._on_host: list[Tensor] = []
        for module in (sampling, draft_model):
            monkeypatch.setattr(module, "to_host", self._counted(module.to_host))  # type: ignore[attr-defined]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        known = self._inside or any(args[0] is tensor for tensor in self._on_host if args)
        if name in READING_METHODS and not known:
            self.others.append(name)
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        self.kernels.__enter__()
        return super().__enter__()

    def __exit__(self, *what: Any) -> None:
        super().__exit__(*what)
        self.kernels.__exit__(*what)

    def _counted(self, to_host: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def count(tensor: Tensor) -> Tensor:
            self.through_the_door += 1
            self._inside = True
            self._on_host = [to_host(tensor)]
            self._inside = False
            return self._on_host[0]

        return count


class _Kernels(TorchDispatchMode):
    """Reads below Python's methods: boolean indices, sizes that depend on numbers."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in READING_KERNELS:
            self.reads.others.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


KINDS = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top-p": {"top_p": 0.9},
    "filters": {"top_k": 20, "min_p": 0.01, "temperature": 0.7},
    "seeded": {"seed": 3},
    "seeded top-p": {"seed": 3, "top_p": 0.9},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.2, "min_tokens": 9},
    "bans": {"logit_bias": {5: -100.0}, "allowed_token_ids": range(3, 250), "bad_word_ids": [[7], [8, 9]]},
}


def blind(target: LanguageModel) -> TokenSampler:
    """A sampler for which device reads are not free."""
    return TokenSampler(target.identity.vocab_size, target.device, reads_are_free=False)


EVEN = DraftProbs(torch.full((1, 3), 1 / 3), torch.tensor([65, 66, 80]))
TREES = {
    "chain": TokenTree.chain([65, 66, 67]),
    "wide": TokenTree((65, 66, 67), (SiblingGroup(ROOT, (0, 1), drawn_from=EVEN), SiblingGroup(1, (2,), LOOKUP))),
}


class Guesses(Proposer):
    """Always proposes the same three tokens."""

    def __init__(self, tree: TokenTree) -> None:
        self.tree = tree

    def propose(self, requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        return [self.tree.shortened(request.speculation_length) for request in requests]


def started(engine: Engine, wishes: list[dict[str, Any]]) -> Engine:
    """The engine with a request of each kind, all of them past their prompts."""
    for i, wish in enumerate(wishes):
        params = SamplingParams(max_tokens=40, ignore_eos=True, **wish)
        engine.submit(Request(str(i), tuple(prompts()[1]), params))
    for _ in range(3):
        engine.step()
    return engine


def pages_held(engine: Engine) -> int:
    pages = engine.sequences.pool.pages
    return 0 if pages is None else pages.used


@pytest.mark.parametrize("kinds", [[name] for name in KINDS] + [list(KINDS)], ids=lambda kinds: "+".join(kinds)[:20])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("page", [0, 4], ids=["slots", "pages"])
def test_a_step_reads_the_device_once(
    target: LanguageModel,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    tree: str,
    kinds: list[str],
    page: int,
) -> None:
    """Pages that texts grow into in this very step cost no read either."""
    guesses = Guesses(TREES[tree])
    engine = make_engine(
        sampler_object=blind(target), proposer_object=guesses, max_slots=8, compile=False, page_tokens=page, **DEVICE
    )
    started(engine, [KINDS[kind] for kind in kinds])
    held = pages_held(engine)
    with Reads(monkeypatch) as reads:
        for _ in range(4 if page else 1):
            reads.through_the_door = 0
            output = engine.step()
    assert pages_held(engine) > held or not page
    assert output.result is not None
    assert sum(row.nodes for row in output.result.rows) > 0
    assert (reads.through_the_door, reads.others) == (1, [])


@pytest.mark.parametrize("kinds", [[name] for name in KINDS] + [list(KINDS)], ids=lambda kinds: "+".join(kinds)[:20])
def test_a_draft_that_drafts_blocks_is_one_read_more(
    target: LanguageModel,
    draft: LanguageModel,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    kinds: list[str],
) -> None:
    engine = make_engine(draft, sampler_object=blind(target), max_slots=8, compile=False, **DEVICE)
    started(engine, [KINDS[kind] for kind in kinds])
    with Reads(monkeypatch) as reads:
        output = engine.step()
    assert output.result is not None
    assert sum(row.nodes for row in output.result.rows) > 0
    assert (reads.through_the_door, reads.others) == (2, [])


def test_a_prompt_is_read_with_one_look(
    target: LanguageModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(sampler_object=blind(target), compile=False, **DEVICE)
    engine.submit(Request("a", tuple(prompts()[4]), SamplingParams(max_tokens=5)))
    with Reads(monkeypatch) as reads:
        assert engine.step().deltas
    assert (reads.through_the_door, reads.others) == (1, [])


@pytest.mark.parametrize("kind", list(KINDS))
def test_without_looks_the_same_is_written(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, kind: str
) -> None:
    """Same uniforms, same verdicts: two engines, of which one reads freely and one does not."""
    written = []
    for sampler in (None, blind(target)):
        engine = make_engine(
            draft, sampler_object=sampler, proposer="lookup_else_model", proposer_options={"shortest": 3}, **DEVICE
        )
        outputs = engine.generate(prompts(5), SamplingParams(max_tokens=16, **KINDS[kind]))
        assert sum(output.stats.accepted for output in outputs) > 0
        written.append([output.token_ids for output in outputs])
        engine.close()
    assert written[0] == written[1]
