"""The chunked loss against the per-token references on whole logits: value, gradient, metrics, memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from distillspec.errors import ConfigError
from distillspec.losses import (
    LOSS_NAMES,
    ChunkedLoss,
    DenseTeacher,
    LossInputs,
    LossMix,
    NoTeacher,
    SignalTeacher,
    Teacher,
    acceptance_of,
    advantages,
    chunked,
    chunked_loss,
    chunked_token_values,
    default_chunk_tokens,
    per_token_loss,
)
from distillspec.losses.sampled import label_view
from distillspec.types import OutputHead, TeacherSignal

T, D, V = 11, 6, 14
KEPT = torch.tensor([9, 1, 4, 0, 7, 13, 2])
TEACHERS = ("dense", "topk", "sampled", "none")


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    hidden: Tensor
    head: OutputHead
    teacher: Teacher
    kwargs: dict[str, Any]

    @property
    def leaves(self) -> list[Tensor]:
        assert self.head.bias is not None
        return [self.hidden, self.head.weight, self.head.bias]

    def chunked(self, mix: Any, **kwargs: Any) -> ChunkedLoss:
        return chunked_loss(self.hidden, self.head, self.teacher, LossMix.parse(mix), **{**self.kwargs, **kwargs})

    def inputs(self, **kwargs: Any) -> LossInputs:
        logits, signal = self.teacher.chunk(0, T)
        known = {name: value for name, value in self.kwargs.items() if name != "weights"}
        return LossInputs(
            self.head.logits(self.hidden).float(), target_logits=logits, signal=signal, **{**known, **kwargs}
        )


def make(teacher: str, truncated: bool = False, dtype: torch.dtype = torch.float32) -> Case:
    width = len(KEPT) if truncated else V
    head = OutputHead(
        noise(width, D, seed=1).to(dtype).requires_grad_(),
        bias=noise(width, seed=2).to(dtype).requires_grad_(),
        scale=0.8,
        softcap=5.0,
    )
    target_head = OutputHead(noise(V, D + 2, seed=3).to(dtype), softcap=20.0)
    target_hidden = noise(T, D + 2, seed=4).to(dtype)
    logp = torch.log_softmax(target_head.logits(target_hidden).float(), -1)
    top = logp.topk(4)
    drawn = torch.multinomial(logp.exp(), 5, generator=torch.Generator().manual_seed(5))
    teachers: dict[str, Teacher] = {
        "dense": DenseTeacher(target_hidden, target_head),
        "topk": SignalTeacher(TeacherSignal("topk", top.indices.int(), top.values, 1 - top.values.exp().sum(-1))),
        "sampled": SignalTeacher(TeacherSignal("sampled", drawn.int(), logp.gather(-1, drawn), torch.zeros(T))),
        "none": NoTeacher(),
    }
    kwargs = {
        # The target's favourites earn rewards, arbitrary tokens mostly none.
        "labels": torch.where(torch.arange(T) < 6, top.indices[:, 0], torch.arange(T)),
        "from_draft": torch.arange(T) % 3 != 1,
        "weights": torch.tensor([1.0, 0.5, 0.0] * 4)[:T],
        "kept_ids": KEPT if truncated else None,
    }
    return Case(noise(T, D, seed=0).to(dtype).requires_grad_(), head, teachers[teacher], kwargs)


def supported(name: str, teacher: str) -> bool:
    if teacher == "none":
        return name == "ce"
    return teacher != "sampled" or name in ("fkl", "ce")


def reference(case: Case, name: str, **kwargs: Any) -> Tensor:
    inputs = case.inputs(**kwargs)
    if name == "tvdpp":  # chunks cannot see the batch: give both sides the batch's advantages
        view = label_view(inputs)
        assert inputs.from_draft is not None
        inputs = replace(inputs, advantage=advantages(view.reward, view.valid & inputs.from_draft))
    result = per_token_loss(name, inputs)
    weights = case.kwargs["weights"]
    return (weights * result.values).sum() / (weights * result.valid).sum()


def gradients(loss: Tensor, case: Case) -> list[Tensor]:
    return list(torch.autograd.grad(loss, case.leaves))


@pytest.mark.parametrize(("chunk_tokens", "block_rows"), [(1, 1), (4, 3), (4, 4), (11, 2), (64, 64), (None, 5)])
@pytest.mark.parametrize("truncated", [False, True], ids=["full", "truncated"])
@pytest.mark.parametrize(
    ("name", "teacher"),
    [(name, teacher) for name in LOSS_NAMES for teacher in TEACHERS if supported(name, teacher)],
)
def test_equals_the_reference_in_value_and_gradient(
    name: str,
    teacher: str,
    truncated: bool,
    chunk_tokens: int | None,
    block_rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunked, "block_tokens", lambda *_: block_rows)
    case = make(teacher, truncated)
    expected = reference(case, name)
    result = case.chunked(name, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(result.loss, expected)
    for actual, wanted in zip(gradients(3 * result.loss, case), gradients(3 * expected, case), strict=True):
        assert wanted.abs().max() > 0
        torch.testing.assert_close(actual, wanted, atol=2e-6, rtol=1e-4)


def test_temperature_parameters_and_weights_reach_a_mix() -> None:
    case = make("dense")
    mix = {"jsd": {"weight": 0.5, "beta": 0.2}, "tvd": 2.0}
    inputs = case.inputs(temperature=1.6)
    values = 0.5 * per_token_loss("jsd", inputs, beta=0.2).values + 2 * per_token_loss("tvd", inputs).values
    expected = (case.kwargs["weights"] * values).sum() / case.kwargs["weights"].sum()
    result = case.chunked(mix, temperature=1.6, chunk_tokens=3)
    torch.testing.assert_close(result.loss, expected)
    for actual, wanted in zip(gradients(result.loss, case), gradients(expected, case), strict=True):
        torch.testing.assert_close(actual, wanted, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("teacher", TEACHERS)
def test_metrics_are_weighted_sums(teacher: str) -> None:
    case = make(teacher, truncated=True)
    mix = {"ce": 0.5} if teacher == "none" else {"fkl": 1.0, "ce": 0.5}
    result = case.chunked(mix, chunk_tokens=4)
    weights, inputs = case.kwargs["weights"], case.inputs()
    terms = {name: per_token_loss(name, inputs) for name in mix}
    expected = {"weight": weights.sum(), "loss": torch.tensor(0.0)}
    for name, term in terms.items():
        expected[name] = (weights * term.values).sum()
        expected[f"{name}_weight"] = (weights * term.valid).sum()
        expected["loss"] = expected["loss"] + mix[name] * expected[name]
    any_valid = torch.stack([term.valid for term in terms.values()]).any(0)
    expected["valid_weight"] = (weights * any_valid).sum()
    expected["outside"] = (weights * next(iter(terms.values())).outside).sum()
    alpha = acceptance_of(inputs)
    if alpha is not None:
        expected["alpha"] = (weights * alpha).sum()
    assert set(result.metrics) == set(expected)
    for name, value in expected.items():
        assert not result.metrics[name].requires_grad
        torch.testing.assert_close(result.metrics[name], value.detach(), msg=f"{name} differs")


def test_an_explicit_normalizer_makes_parts_add_up_to_the_whole() -> None:
    case = make("dense")
    whole = case.chunked("fkl")
    total = case.kwargs["weights"].sum()
    parts = []
    for rows in (slice(0, 4), slice(4, T)):
        teacher = case.teacher
        assert isinstance(teacher, DenseTeacher)
        kwargs = {name: value[rows] if isinstance(value, Tensor) else value for name, value in case.kwargs.items()}
        part = Case(case.hidden[rows], case.head, DenseTeacher(teacher.hidden[rows], teacher.head), kwargs)
        parts.append(part.chunked("fkl", normalizer=total))
    torch.testing.assert_close(parts[0].loss + parts[1].loss, whole.loss)
    both = gradients(parts[0].loss + parts[1].loss, case)
    for actual, wanted in zip(both, gradients(whole.loss, case), strict=True):
        torch.testing.assert_close(actual, wanted)


def test_a_batch_with_nothing_to_learn_from_is_zero_with_zero_gradient() -> None:
    case = make("none", truncated=True)
    result = case.chunked("ce", labels=torch.full((T,), 3))  # 3 is not kept
    assert result.loss == 0
    assert all((gradient == 0).all() for gradient in gradients(result.loss, case))


@pytest.mark.parametrize("frozen", ["hidden", "head"])
def test_only_what_requires_grad_gets_one(frozen: str) -> None:
    case = make("dense")
    wanted = gradients(reference(case, "rkl"), case)
    for leaf in case.leaves[:1] if frozen == "hidden" else case.leaves[1:]:
        leaf.requires_grad_(False)
    case.chunked("rkl").loss.backward()
    for leaf, gradient in zip(case.leaves, wanted, strict=True):
        if leaf.requires_grad:
            torch.testing.assert_close(leaf.grad, gradient, atol=2e-6, rtol=1e-4)
        else:
            assert leaf.grad is None


def test_without_grad_mode_nothing_is_differentiated() -> None:
    case = make("dense")
    with torch.no_grad():
        result = case.chunked("fkl")
    assert not result.loss.requires_grad
    torch.testing.assert_close(result.loss, reference(case, "fkl").detach())


def test_a_second_backward_is_refused() -> None:
    loss = make("dense").chunked("fkl").loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward"):
        loss.backward()


@pytest.mark.parametrize("name", ["fkl", "lk", "tvdpp"])
def test_bfloat16_weights_get_bfloat16_gradients_of_float32_losses(name: str) -> None:
    case, exact = make("dense", dtype=torch.bfloat16), make("dense")
    for leaf, rounded in zip(exact.leaves, case.leaves, strict=True):
        leaf.data.copy_(rounded)
    result = case.chunked(name, chunk_tokens=4)
    assert result.loss.dtype == torch.float32
    torch.testing.assert_close(result.loss, reference(exact, name), atol=0.02, rtol=0.05)
    for actual, wanted in zip(gradients(result.loss, case), gradients(reference(exact, name), exact), strict=True):
        assert actual.dtype == torch.bfloat16
        torch.testing.assert_close(actual.float(), wanted, atol=0.03, rtol=0.1)


def test_under_autocast_float32_weights_keep_float32_gradients() -> None:
    case, exact = make("dense"), make("dense")
    with torch.autocast("cpu", torch.bfloat16):
        result = case.chunked("fkl", chunk_tokens=4)
    result.loss.backward()
    for leaf, wanted in zip(case.leaves, gradients(reference(exact, "fkl"), exact), strict=True):
        assert leaf.grad is not None
        assert leaf.grad.dtype == torch.float32
        torch.testing.assert_close(leaf.grad, wanted, atol=0.03, rtol=0.1)


@pytest.mark.parametrize("leaf", [0, 1, 2], ids=["hidden", "weight", "bias"])
def test_gradients_match_finite_differences(leaf: int) -> None:
    case = make("dense", dtype=torch.float64)
    mix = {"fkl": 1.0, "jsd": 1.0}
    gradient = gradients(case.chunked(mix, chunk_tokens=4).loss, case)[leaf]
    direction = gradient / gradient.norm()
    step = 1e-2  # the scalar itself is float32
    losses = []
    for sign in (1, -1):
        moved = make("dense", dtype=torch.float64)
        moved.leaves[leaf].data.add_(direction, alpha=sign * step)
        losses.append(moved.chunked(mix, chunk_tokens=4).loss.item())
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(gradient.norm().item(), rel=1e-3)


class LargestTensor(TorchDispatchMode):
    """Watches every operation's results and remembers the most elements one of them had."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


@pytest.mark.parametrize(
    ("name", "teacher"),
    [(name, teacher) for name in LOSS_NAMES for teacher in TEACHERS if supported(name, teacher)],
)
def test_no_tensor_is_ever_as_large_as_tokens_times_vocabulary(name: str, teacher: str) -> None:
    case = make(teacher)
    with LargestTensor() as largest:
        case.chunked(name, chunk_tokens=2).loss.backward()
    head_elements = V * (D + 2)
    assert 2 * V <= largest.elements <= head_elements < T * V


def test_the_memory_watch_sees_whole_logits() -> None:
    case = make("dense")
    with LargestTensor() as largest:
        reference(case, "fkl").backward()
    assert largest.elements >= T * V


def test_default_sizes_keep_temporaries_small_and_chunks_large() -> None:
    cpu = torch.device("cpu")
    assert 64 <= default_chunk_tokens(49_152, 49_152, cpu) < default_chunk_tokens(8_192, 49_152, cpu)
    assert chunked.block_tokens(49_152, 49_152, cpu) * 49_152 * 12 * 4 <= 2**25
    assert chunked.block_tokens(8_192, 0, cpu) > chunked.block_tokens(8_192, 49_152, cpu) > 16


@pytest.mark.parametrize("teacher", ["dense", "topk"])
def test_token_values_equal_the_reference(teacher: str) -> None:
    case = make(teacher, truncated=True)
    kwargs = {name: case.kwargs[name] for name in ("labels", "from_draft", "kept_ids")}
    tokens = chunked_token_values(case.hidden, case.head, case.teacher, "jsd", {"beta": 0.3}, chunk_tokens=4, **kwargs)
    assert tokens.values is not None
    assert tokens.labels is not None
    assert not tokens.values.requires_grad
    torch.testing.assert_close(tokens.values, per_token_loss("jsd", case.inputs(), beta=0.3).values)
    valid = torch.isin(case.kwargs["labels"], KEPT)
    assert torch.equal(tokens.labels.valid, valid)
    draft_logp = torch.log_softmax(case.head.logits(case.hidden), -1)
    column = {int(token): index for index, token in enumerate(KEPT)}
    for row in valid.nonzero().flatten().tolist():
        label = int(case.kwargs["labels"][row])
        torch.testing.assert_close(tokens.labels.draft_logp[row], draft_logp[row, column[label]])
        if isinstance(case.teacher, DenseTeacher):
            target_logp = torch.log_softmax(case.teacher.chunk(0, T).logits, -1)[row, label]
            torch.testing.assert_close(tokens.labels.target_logp[row], target_logp)
            assert tokens.labels.reward[row] == float(target_logp > draft_logp[row, column[label]])


def test_labels_alone_can_be_asked_for_and_a_signal_of_samples_cannot_tell() -> None:
    dense, sampled = make("dense"), make("sampled")
    labels = dense.kwargs["labels"]
    view = chunked_token_values(dense.hidden, dense.head, dense.teacher, labels=labels)
    assert view.values is None
    assert view.labels is not None
    fkl = chunked_token_values(sampled.hidden, sampled.head, sampled.teacher, "fkl", labels=labels)
    assert fkl.values is not None
    assert fkl.labels is None


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_bad_hidden_states_name_the_loss_and_the_position(name: str) -> None:
    case = make("dense")
    case.hidden.data[9, 0] = math.nan
    owner = "label log-probabilities" if name == "tvdpp" else name
    with pytest.raises(ValueError, match=f"{owner}: draft logits: NaN at position 9"):
        case.chunked(name, chunk_tokens=4)


def test_misuse_is_refused_in_plain_words() -> None:
    case = make("dense")
    with pytest.raises(ValueError, match="one for each of 11 rows"):
        case.chunked("fkl", weights=torch.ones(3))
    with pytest.raises(ValueError, match="labels has 12 positions, draft_hidden 11"):
        case.chunked("fkl", labels=torch.zeros(T + 1).long())
    with pytest.raises(ValueError, match="the teacher has 11 positions, draft_hidden 4"):
        chunked_token_values(case.hidden[:4], case.head, case.teacher, "fkl")
    with pytest.raises(ConfigError, match="needs from_draft"):
        case.chunked("tvdpp", from_draft=None)
    with pytest.raises(ConfigError, match="fkl needs a target"):
        make("none").chunked("fkl")
