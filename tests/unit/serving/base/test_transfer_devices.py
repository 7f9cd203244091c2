"""A draft on another device than its target: what each computes is its own, and all hand-over goes through `between`.

There is no accelerator here, let alone two. Two CPU devices stand for them: each tensor counts as one of the device
that it was made for, or that those lie on which it was computed of. What was made for none is the host's. Where tensors
of both devices meet, accelerators would refuse.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from distillspec.models import LanguageModel, slot_cache
from distillspec.serving import Request, SamplingParams
from distillspec.serving.base import transfer
from distillspec.serving.base.transfer import between

from ...models.state_drafts import state_draft
from ..conftest import MakeEngine, plain_answers, prompts
from .test_transfer import DEVICE, KINDS, blind

TARGETS, DRAFTS = torch.device("cpu", 0), torch.device("cpu", 1)
HOST = torch.device("cpu")
GET_DEVICE = torch.Tensor.device.__get__  # type: ignore[attr-defined]


class Devices(TorchFunctionMode):
    """Knows which device each tensor counts as one of, and notes where those of two meet.

    Attributes:
        mixed: operations with tensors of both devices, or that move one between them elsewhere than in `between`.
        handed_over: tensors by the devices that they were moved between.
    """

    def __init__(self, homes: Mapping[torch.device, Iterable[Tensor]]) -> None:
        super().__init__()
        self.mixed: list[str] = []
        self.handed_over = Counter[tuple[torch.device, torch.device]]()
        self._homes: dict[int, tuple[Tensor, torch.device]] = {}  # held: no other tensor gets the id
        for device, tensors in homes.items():
            for tensor in tensors:
                self._put(tensor, device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == GET_DEVICE:
            return self.of(args[0])
        name = getattr(func, "__name__", "")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        wanted = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.device)), None)
        real_args, real_kwargs = tree_map(lambda leaf: HOST if isinstance(leaf, torch.device) else leaf, (args, kwargs))
        result = func(*real_args, **real_kwargs)
        if name == "cpu":
            return self._put(result.detach(), HOST)  # another object than the device's
        if name == "to" and len(given) > 1:
            wanted = self.of(given[1])
        if name == "to" and wanted is not None:
            return self._moved(given[0], result.detach(), wanted)
        return self._computed(name, given, result, wanted)

    def of(self, tensor: Tensor) -> torch.device:
        """Return the device that a tensor counts as one of."""
        return self._homes.get(id(tensor), (tensor, HOST))[1]

    def _moved(self, tensor: Tensor, result: Tensor, device: torch.device) -> Tensor:
        before = self.of(tensor)
        if HOST not in (before, device) and before != device:
            self.handed_over[before, device] += 1
            if not self._is_in_between():
                self.mixed.append("to")
        return self._put(result, device)

    def _computed(self, name: str, given: list[Tensor], result: Any, wanted: torch.device | None) -> Any:
        homes = {self.of(tensor) for tensor in given} - {HOST}
        if len(homes) > 1:
            self.mixed.append(name)
        device = wanted or next(iter(homes), HOST)
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and not any(made is tensor for tensor in given):
                self._put(made, device)
        return result

    @staticmethod
    def _is_in_between() -> bool:
        frame: Any = sys._getframe(2)
        for _ in range(3):
            if frame is not None and frame.f_code is between.__code__:
                return True
            frame = None if frame is None else frame.f_back
        return False

    def _put(self, tensor: Tensor, device: torch.device) -> Tensor:
        self._homes[id(tensor)] = tensor, device
        return tensor


def apart(target: LanguageModel, draft: LanguageModel) -> Devices:
    """Return devices of which one has the target's weights, the other the draft's."""
    homes = {
        device: [*model.model.parameters(), *model.model.buffers()]
        for device, model in ((TARGETS, target), (DRAFTS, draft))
    }
    ids = [set(map(id, tensors)) for tensors in homes.values()]
    assert not ids[0] & ids[1], "they share weights"
    return Devices(homes)


SETTINGS: dict[str, Any] = {
    "max_slots": 8,
    "compile": False,
    "pack_weights": False,  # kernels of CPUs take what lies on the host
    "speculation_length": 3,
    "prefix_reuse": False,
    **DEVICE,
}
WAYS: dict[str, dict[str, Any]] = {
    "loop": {},
    "levels": {"draft_confidence": 1e-6},
    "sampled tree": {"tree": "sampled", "widths": [2, 2, 1]},
}
WISHES = ("greedy", "top-p", "seeded", "bans")
CASES = [("truncated", "loop", 0), ("truncated", "levels", 0), ("half", "sampled tree", 4), ("eagle", "loop", 4)]
CASES += [("eagle", "sampled tree", 0), ("block", "loop", 0), ("hydra", "loop", 0)]


@pytest.fixture(autouse=True)
def _caches_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_cache, "commits_lazily", lambda device: False)


@pytest.mark.parametrize(("kind", "way", "page"), CASES)
def test_target_and_draft_meet_nowhere_but_in_hand_over(
    target: LanguageModel,
    draft: LanguageModel,
    truncated_draft: LanguageModel,
    make_engine: MakeEngine,
    kind: str,
    way: str,
    page: int,
) -> None:
    own = {"half": draft, "truncated": truncated_draft}.get(kind) or state_draft(kind, target)
    params = [SamplingParams(max_tokens=6, ignore_eos=True, **KINDS[name]) for name in WISHES]
    chosen = [place for place, name in enumerate(WISHES) if name in ("greedy", "seeded")]
    asked = [prompts()[1] for _ in WISHES]
    wanted = plain_answers(target, [asked[place] for place in chosen], [params[place] for place in chosen])
    devices = apart(target, own)
    with devices:
        assert (target.device, own.device) == (TARGETS, DRAFTS)
        engine = make_engine(own, sampler_object=blind(target), page_tokens=page, **SETTINGS, **WAYS[way])
        for place, each in enumerate(params):
            engine.submit(Request(str(place), tuple(asked[place]), each))
        found = engine.run_until_done([str(place) for place in range(len(params))])
    assert devices.mixed == []
    assert [found[str(place)].token_ids for place in chosen] == wanted
    assert sum(output.stats.proposed for output in found.values()) > 0
    assert devices.handed_over[DRAFTS, TARGETS] > 0, "distributions"
    assert (devices.handed_over[TARGETS, DRAFTS] > 0) == (own.state_input is not None), "states"


@pytest.mark.parametrize("way", ["add", "index", "hidden"])
def test_a_meeting_is_seen(way: str) -> None:
    there, here = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    with Devices({TARGETS: [there], DRAFTS: [here]}) as devices:
        if way == "add":
            there + here
        elif way == "index":
            there[here]
        else:
            there.to(DRAFTS)
    assert len(devices.mixed) == 1


def test_hand_over_and_the_hosts_numbers_are_none() -> None:
    there, here = torch.zeros(3), torch.zeros(3)
    with Devices({TARGETS: [there], DRAFTS: [here]}) as devices:
        assert between(here, TARGETS).device == TARGETS
        there + between(here, TARGETS)
        there + transfer.to_device([1, 2, 3], TARGETS)
        transfer.to_host(there) + transfer.to_host(here)
        torch.zeros(3, device=here.device) + here
    assert devices.mixed == []
    assert devices.handed_over[DRAFTS, TARGETS] == 2


def test_on_one_device_nothing_is_copied() -> None:
    held = torch.zeros(3)
    assert between(held, held.device) is held
