"""The chunked loss equals the per-token references on whole logits: value, gradient, metrics."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from distillspec.errors import ConfigError
from distillspec.losses import (
    LOSS_NAMES,
    DenseTeacher,
    acceptance_of,
    chunked_token_values,
    chunks,
    per_token_loss,
)

from .chunked_cases import TEACHERS, Case, T, gradients, make, reference, supported


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
    monkeypatch.setattr(chunks, "block_tokens", lambda *_: block_rows)
    case = make(teacher, truncated)
    expected = reference(case, name)
    result = case.chunked(name, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(result.loss, expected)
    for actual, wanted in zip(gradients(3 * result.loss, case), gradients(3 * expected, case), strict=True):
        assert wanted.abs().max() > 0
        torch.testing.assert_close(actual, wanted, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("truncated", [False, True], ids=["full", "truncated"])
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_recorded_hidden_states_teach_what_the_live_target_does(name: str, truncated: bool) -> None:
    live, recorded = make("dense", truncated), make("hidden", truncated)
    expected, found = live.chunked(name, chunk_tokens=4), recorded.chunked(name, chunk_tokens=4)
    for metric, value in expected.metrics.items():
        torch.testing.assert_close(found.metrics[metric], value)
    for actual, wanted in zip(gradients(found.loss, recorded), gradients(expected.loss, live), strict=True):
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
