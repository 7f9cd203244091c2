"""Nothing of a step waits for an upload: all that goes to the device goes through `to_device`.

There is no accelerator here. What a step makes without naming a device, or reads through `cpu`, counts as the host's,
and so does what is computed of that alone. All else counts as the device's. Where both meet, an accelerator would copy
and wait, or refuse.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from distillspec.models import LanguageModel
from distillspec.serving import Engine, Request, SamplingParams
from distillspec.serving.base import transfer

from ...models.state_drafts import state_draft
from ..conftest import MakeEngine, prompts
from .test_transfer import DEVICE, KINDS, TREES, Guesses, blind

FROM_NUMBERS = {"tensor", "as_tensor", "asarray", "new_tensor"}
INDEXING = {"__getitem__", "__setitem__"}


class Uploads(TorchFunctionMode):
    """Notes the ways that numbers of the host get to the device, but `to_device`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: list[str] = []
        self.through_the_door = 0
        self._host: dict[int, Tensor] = {}  # by id, and held: no other tensor gets the id
        from_numpy = torch.from_numpy  # no mode sees it
        monkeypatch.setattr(torch, "from_numpy", lambda array: self._made_on_host(from_numpy(array)))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        result = func(*args, **kwargs)
        if name == "cpu":
            return self._made_on_host(result.detach())  # another object than the device's
        if self._is_in_to_device() and name == "to":
            self.through_the_door += 1
            return result.detach()
        self._check(name, args, kwargs, given)
        if given:
            on_host = all(map(self.is_host, given))
        else:
            on_host = kwargs.get("device") is None
        for made in tree_leaves(result) if on_host else ():
            if isinstance(made, Tensor):
                self._made_on_host(made)
        return result

    def is_host(self, tensor: Tensor) -> bool:
        return id(tensor) in self._host

    def _check(self, name: str, args: Any, kwargs: Any, given: list[Tensor]) -> None:
        on_host = [tensor for tensor in given if self.is_host(tensor)]
        if name in FROM_NUMBERS and (kwargs.get("device") is not None or (given and not on_host)):
            self._note(f"{name} of numbers")
        elif name in ("to", "cuda") and on_host and self._names_device(args[1:], kwargs):
            self._note(name)
        elif name in INDEXING and not self.is_host(args[0]) and _has_numbers(args[1]):
            self._note(f"{name} by numbers")
        # Tensors of one number are arguments of a kernel.
        elif len(on_host) < len(given) and any(tensor.dim() for tensor in on_host):
            self._note(f"{name} of both")

    @staticmethod
    def _names_device(args: Any, kwargs: Any) -> bool:
        others = [*args, *kwargs.values()]
        return not kwargs.get("non_blocking") and any(isinstance(own, torch.device | str | Tensor) for own in others)

    def _note(self, what: str) -> None:
        frame = sys._getframe(1)
        while "torch" in Path(frame.f_code.co_filename).parts or frame.f_code.co_filename == __file__:
            assert frame.f_back is not None
            frame = frame.f_back
        self.found.append(f"{what}, {Path(frame.f_code.co_filename).name}:{frame.f_lineno}")

    @staticmethod
    def _is_in_to_device() -> bool:
        frame = sys._getframe(2)
        return any(own is not None and own.f_code is transfer.to_device.__code__ for own in (frame, frame.f_back))

    def _made_on_host(self, tensor: Tensor) -> Tensor:
        self._host[id(tensor)] = tensor
        return tensor


def _has_numbers(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, list | range) or type(part).__module__ == "numpy" for part in parts)


def steps(engine: Engine, uploads: Uploads, wishes: list[dict[str, Any]], count: int = 6) -> list[str]:
    """Blocking uploads of steps from the first prompt on, in which a row of each kind is speculated on."""
    for i, wish in enumerate(wishes):
        params = SamplingParams(max_tokens=40, ignore_eos=True, **wish)
        engine.submit(Request(str(i), tuple(prompts()[1]), params))
    nodes = 0
    with uploads:
        for _ in range(count):
            result = engine.step().result
            assert result is not None
            nodes += sum(row.nodes for row in result.rows)
    assert nodes > 0
    assert uploads.through_the_door >= count
    return uploads.found


# Packed weights are for kernels of CPUs, which take what lies on the host.
SETTINGS: dict[str, Any] = {"max_slots": 8, "compile": False, "pack_weights": False, "speculation_length": 3, **DEVICE}


@pytest.mark.parametrize("kinds", [[name] for name in KINDS] + [list(KINDS)], ids=lambda kinds: "+".join(kinds)[:20])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("page", [0, 4], ids=["slots", "pages"])
def test_verdicts_wait_for_no_upload(
    target: LanguageModel,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    tree: str,
    kinds: list[str],
    page: int,
) -> None:
    guesses = Guesses(TREES[tree])
    engine = make_engine(sampler_object=blind(target), proposer_object=guesses, page_tokens=page, **SETTINGS)
    assert steps(engine, Uploads(monkeypatch), [KINDS[kind] for kind in kinds]) == []


WAYS: dict[str, dict[str, Any]] = {
    "loop": {},
    "levels": {"draft_confidence": 1e-6},
    "sampled tree": {"tree": "sampled", "widths": [2, 2, 1]},
    "topk tree": {"tree": "topk", "widths": [2, 2, 1]},
    "dynamic tree": {"tree": "dynamic"},
}


@pytest.mark.parametrize("kind", ["truncated", "eagle", "medusa", "hydra", "block"])
@pytest.mark.parametrize("way", WAYS)
def test_drafts_wait_for_no_upload(
    target: LanguageModel,
    truncated_draft: LanguageModel,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    kind: str,
) -> None:
    """Of states that the target keeps for others too, a draft reads its own."""
    draft = truncated_draft if kind == "truncated" else state_draft(kind, target)
    other = {} if kind == "truncated" else {"feature_ids": [2]}
    engine = make_engine(draft, sampler_object=blind(target), **SETTINGS, **WAYS[way], **other)
    wishes = [KINDS[name] for name in ("greedy", "temperature", "top-p")]
    assert steps(engine, Uploads(monkeypatch), wishes) == []


DEVICE_ONLY = torch.device("cpu")  # stands for the accelerator
BLOCKING: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "numbers": (lambda held: torch.tensor([1, 2], device=DEVICE_ONLY), "tensor of numbers"),
    "new_tensor": (lambda held: held.new_tensor([1, 2]), "new_tensor of numbers"),
    "to": (lambda held: torch.arange(2).to(DEVICE_ONLY), "to"),
    "to like": (lambda held: torch.arange(2).to(held), "to"),
    "index": (lambda held: held[[1, 2]], "__getitem__ by numbers"),
    "host index": (lambda held: held[torch.arange(2)], "__getitem__ of both"),
    "copy": (lambda held: held.copy_(torch.ones(3)), "copy_ of both"),
    "read": (lambda held: held + transfer.to_host(held), "add of both"),
}


@pytest.mark.parametrize("way", BLOCKING)
def test_a_blocking_upload_is_seen(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    held = torch.zeros(3)
    upload, what = BLOCKING[way]
    with Uploads(monkeypatch) as uploads:
        upload(held)
    assert [found.rpartition(",")[0] for found in uploads.found] == [what]


def test_other_work_is_no_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    held = torch.zeros(3)
    with Uploads(monkeypatch) as uploads:
        held.index_select(0, transfer.to_device([0, 2], DEVICE_ONLY))
        held * torch.tensor(2.0) + torch.full((3,), 1.0, device=DEVICE_ONLY)
        (torch.arange(3) * 2).to(torch.int32)
        held[1:].fill_(3.0)
    assert uploads.found == []
