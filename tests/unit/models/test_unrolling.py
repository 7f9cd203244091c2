"""All drafted positions at once are what a draft gives one token after another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from distillspec.models import LanguageModel
from distillspec.models.features import read_states
from distillspec.models.unrolling import unrolled as unrolled_at

from .state_drafts import KINDS, drafted_logits, state_draft


def unrolled(draft: LanguageModel, ids: Tensor, places: Tensor, states: Tensor, steps: int) -> list[Tensor]:
    """All tokens at all positions, `[B, L, D]` each."""
    everything = [torch.arange(ids.numel())] * steps
    return [hidden.view(*ids.shape, -1) for hidden in unrolled_at(draft, ids, places, states, everything)]


TEXT = [(11 * place) % 200 + 3 for place in range(14)]


@pytest.mark.numerics
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3", "mistral"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_every_position_is_the_recursion_of_single_tokens(
    random_model: Callable[..., LanguageModel], family: str, kind: str
) -> None:
    target = random_model(family, torch.float64)
    draft = state_draft(kind, target)
    read = torch.tensor([TEXT]), torch.arange(len(TEXT))[None]
    passes = unrolled(draft, *read, read_states(target, *read, draft.state_ids), 4)
    for end in range(1, len(TEXT) - 3):
        expected = drafted_logits(draft, target, TEXT[:end], TEXT[end : end + 4])
        for step, logits in enumerate(expected):
            found = draft.head.logits(passes[step][0, end - 1 + step])
            torch.testing.assert_close(found, logits, atol=1e-9, rtol=1e-9)
    assert not torch.allclose(passes[0][0, 5:], passes[1][0, 5:]), "own states differ from the target's"


@pytest.mark.numerics
@torch.no_grad()
def test_packed_sequences_do_not_see_each_other(random_model: Callable[..., LanguageModel]) -> None:
    target = random_model("llama", torch.float64)
    draft = state_draft("eagle", target)
    places = torch.tensor([[*range(9), *range(5)]])
    states = read_states(target, torch.tensor([TEXT]), places, draft.state_ids)
    packed = unrolled(draft, torch.tensor([TEXT]), places, states, 3)
    for start, end in ((0, 9), (9, 14)):
        part = torch.tensor([TEXT[start:end]]), torch.arange(end - start)[None]
        alone = unrolled(draft, *part, read_states(target, *part, draft.state_ids), 3)
        for together, single in zip(packed, alone, strict=True):
            torch.testing.assert_close(together[:, start:end], single, atol=1e-9, rtol=1e-9)


@torch.no_grad()
def test_what_a_position_may_not_know_does_not_change_it(random_model: Callable[..., LanguageModel]) -> None:
    """Position k at token i knows the target's states up to i − k alone."""
    target = random_model("llama", torch.float64)
    draft = state_draft("eagle", target)
    read = torch.tensor([TEXT]), torch.arange(len(TEXT))[None]
    states = read_states(target, *read, draft.state_ids)
    changed = states.clone()
    changed[:, 6] += 1
    for step, (before, after) in enumerate(
        zip(unrolled(draft, *read, states, 3), unrolled(draft, *read, changed, 3), strict=True)
    ):
        differs = (before != after).any(-1)[0].tolist()
        assert differs == [place >= 7 + step for place in range(len(TEXT))]


@pytest.mark.numerics
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@torch.no_grad()
def test_some_tokens_are_as_among_all(random_model: Callable[..., LanguageModel], family: str, kind: str) -> None:
    """Rows of unlike numbers of tokens, chains that begin before those wanted, and a step that nobody asks for."""
    target = random_model(family, torch.float64)
    draft = state_draft(kind, target)
    ids = torch.tensor([TEXT, TEXT[::-1]])
    places = torch.tensor([[*range(9), *range(5)], [*range(14)]])
    states = read_states(target, ids, places, draft.state_ids)
    every = [hidden.flatten(0, 1) for hidden in unrolled(draft, ids, places, states, 4)]
    for wanted in ([[3, 4, 20], [4, 12, 17], [5], [6, 27]], [[], [9], [], [15, 16, 26]], [[0], [], [], []]):
        some = unrolled_at(draft, ids, places, states, [torch.tensor(rows, dtype=torch.long) for rows in wanted])
        for rows, part, whole in zip(wanted, some, every, strict=True):
            torch.testing.assert_close(part, whole[rows], atol=1e-9, rtol=1e-9)


@pytest.mark.numerics
@pytest.mark.parametrize("kind", ["eagle", "block"])
@pytest.mark.parametrize("packs", [True, False])
def test_tokens_that_nobody_asks_for_have_keys_and_values_alone(
    random_model: Callable[..., LanguageModel], kind: str, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients are those of a pass over all tokens."""
    monkeypatch.setattr("distillspec.models.unrolling.can_attend_by_sequence", lambda model: packs)
    target = random_model("llama", torch.float64)
    draft = state_draft(kind, target)
    draft.model.requires_grad_(True)
    ids, places = torch.tensor([TEXT, TEXT[::-1]]), torch.tensor([[*range(9), *range(5)], [*range(14)]])
    states = read_states(target, ids, places, draft.state_ids)
    wanted = [torch.tensor(rows) for rows in ([4, 5, 6, 12, 13, 27], [5, 6, 13])]
    read: list[int] = []
    hook = draft.layers[0].mlp.register_forward_hook(lambda _, inputs, __: read.append(inputs[0].shape[1]))
    found = []
    for everything in (True, False):
        draft.model.zero_grad()
        if everything:
            passes = unrolled(draft, ids, places, states, 2)
            chosen = [hidden.flatten(0, 1)[rows] for hidden, rows in zip(passes, wanted, strict=True)]
        else:
            chosen = unrolled_at(draft, ids, places, states, wanted)
        torch.cat(chosen).square().sum().backward()
        found.append({name: own.grad.clone() for name, own in draft.model.named_parameters() if own.grad is not None})
    hook.remove()
    assert read == [14, 14, 5, 3], "all tokens, then those of the fullest row"
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-9, rtol=1e-9)
