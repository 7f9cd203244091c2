"""Drafted tokens, chosen on the device: greedy, drawn or seeded rows side by side, without a device read.

Any distribution q is exact if verification is told it, so q may be cheaper than the request's own policy. Here it has
the row's temperature. Filters look at the most probable tokens alone (`PREFIX`). Penalties and biases are those of the
text before the drafted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distillspec.sampling import best_ids, draw_unchecked, largest_probs
from distillspec.serving.base.transfer import to_device
from distillspec.serving.decoding.logits import Columns, Place, needs_transform, transform
from distillspec.serving.decoding.noise import exponentials, key_tensor, noise_key

PREFIX = 64
NO_COLUMN = -1
COLDEST = 1e-6  # temperatures below it are it


class Draws(NamedTuple):
    """Numbers that decide the next `count` tokens of B rows, on the device. A part that no row needs is None."""

    temperatures: Tensor | None = None  # [B] float32, 0 if greedy
    uniforms: Tensor | None = None  # [B, count, most] float64 in [0, 1), for up to `most` siblings
    filters: Tensor | None = None  # [B, 3] float32: tokens of top-k, mass of top-p, ratio of min-p
    keys: Tensor | None = None  # [B, count, 2] int32, noise of seeded rows
    seeded: Tensor | None = None  # [B] bool
    added: Tensor | None = None  # [B, width] float32, biases, bans and penalties that are added to logits
    repetition: Tensor | None = None  # [B, width] float32, the repetition penalty
    greedy: Tensor | None = None  # [B] bool, beside rows that are not

    @property
    def kind(self) -> tuple[bool, ...]:
        """The parts that there are. Draws of one kind and shape can share a recorded loop."""
        return tuple(part is not None for part in self)


class Choice(NamedTuple):
    """Drafted tokens of B rows: siblings, in the order in which they are tried."""

    columns: Tensor  # [B, siblings] int64, −1 where no further token has any probability
    finite: Tensor  # [B] bool. False: the row's logits are NaN, or leave nothing to draft. Its columns mean nothing
    probs: Tensor | None  # [B, width] float32 that drawn ones were drawn from, None if all rows are greedy


def make_draws(places: Sequence[Place], columns: Columns, count: int, uniforms: Tensor, *, best: bool = False) -> Draws:
    """Return what the next `count` tokens after `places` are chosen by.

    Args:
        columns: the draft's.
        uniforms: `[B, count, most]` float64 on the draft's device, of the proposals' own stream.
        best: choose the most probable tokens where others would be drawn.
    """
    device = uniforms.device
    added, repetition = _static_changes(places, columns, device)
    all_params = [place.sequence.params for place in places]
    temperatures = [0.0 if best and params.seed is None else params.temperature for params in all_params]
    if not any(temperatures):
        return Draws(added=added, repetition=repetition)
    filtered = any(params.top_k > 0 or params.top_p < 1 or params.min_p > 0 for params in all_params)
    filters = [(params.top_k or columns.width, params.top_p, params.min_p) for params in all_params]
    seeded = [params.seed is not None for params in all_params]
    return Draws(
        to_device(temperatures, device, torch.float32),
        uniforms,
        to_device(filters, device, torch.float32) if filtered else None,
        to_device(noise_keys(places, count), device) if any(seeded) else None,
        to_device(seeded, device, torch.bool) if any(seeded) else None,
        added,
        repetition,
        None if all(temperatures) else to_device([t == 0 for t in temperatures], device, torch.bool),
    )


def choose(logits: Tensor, draws: Draws, step: int, hashed: Tensor, siblings: int = 1) -> Choice:
    """Choose tokens for each row.

    Greedy rows get the most probable tokens, and seeded ones those of the highest noisy scores. Other rows draw without
    replacement: each from what the ones before it have left.

    Args:
        logits: `[B, width]` float32.
        step: which of the `count` tokens it is.
        hashed: `hashed_ids` of the draft's columns.
        siblings: tokens a row.
    """
    if draws.repetition is not None:
        logits = torch.where(logits > 0, logits / draws.repetition, logits * draws.repetition)
    if draws.added is not None:
        logits = logits + draws.added
    peaks = logits.amax(-1, keepdim=True)
    finite = torch.isfinite(peaks[:, 0])
    if draws.temperatures is None or draws.uniforms is None:
        return Choice(_best(logits, siblings), finite, None)
    temperatures = draws.temperatures if draws.greedy is None else torch.where(draws.greedy, 1.0, draws.temperatures)
    probs = torch.softmax((logits - peaks).div_(temperatures.clamp(min=COLDEST)[:, None]), -1)
    if draws.filters is not None:
        probs = _filtered(probs, *draws.filters.unbind(-1))
    chosen = drawn_in_order(probs, draws.uniforms[:, step, :siblings])
    if draws.keys is not None and draws.seeded is not None:
        race = probs / exponentials(draws.keys[:, step], hashed)
        chosen = torch.where(draws.seeded[:, None], _best(race, siblings), chosen)
    if draws.greedy is not None:
        chosen = torch.where(draws.greedy[:, None], _best(logits, siblings), chosen)
    return Choice(chosen, finite, probs)


def _best(scores: Tensor, count: int) -> Tensor:
    """Return the columns `[B, count]` of the highest `scores [B, width]` in order, −1 where the rest is −inf."""
    columns = [best_ids(scores)]
    for _ in range(1, count):
        scores = scores.scatter(1, columns[-1][:, None].clamp(min=0), -torch.inf)
        best = best_ids(scores)
        columns.append(torch.where(scores.gather(1, best[:, None])[:, 0] > -torch.inf, best, NO_COLUMN))
    return torch.stack(columns, 1)


def drawn_in_order(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw columns `[B, count]` without replacement from `probs [B, width]`, −1 where no probability is left.

    `uniforms`: `[B, count]` in [0, 1).
    """
    columns = [draw_unchecked(probs, uniforms[:, 0])]
    rest = probs
    for uniform in uniforms[:, 1:].unbind(-1):
        rest = rest.scatter(1, columns[-1][:, None].clamp(min=0), 0.0)
        column = draw_unchecked(rest, uniform)
        columns.append(torch.where(rest.gather(1, column[:, None])[:, 0] > 0, column, NO_COLUMN))
    return torch.stack(columns, 1)


def _filtered(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return `probs [B, width]` without what filters remove among the `PREFIX` most probable tokens, normalised.

    Rows that keep all of these keep what follows too: their nucleus is wide, and cutting it off would cost acceptance.
    """
    largest = largest_probs(probs, min(PREFIX, probs.shape[-1]))
    rank = torch.arange(largest.shape[-1], device=probs.device)
    kept = (rank < top_k[:, None]) & ((largest.cumsum(-1) - largest) < top_p[:, None])
    count = kept.sum(-1, keepdim=True)  # both conditions hold for a prefix
    smallest = torch.where(count < largest.shape[-1], largest.gather(-1, (count - 1).clamp(min=0)), 0.0)
    edge = torch.maximum(smallest, largest[:, :1] * min_p[:, None])
    kept_probs = probs.masked_fill(probs < edge, 0.0)
    return kept_probs.div_(kept_probs.sum(-1, keepdim=True))


def _static_changes(
    places: Sequence[Place], columns: Columns, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return biases, bans and penalties at `places` as numbers to add, and the repetition penalty to divide by."""
    if not any(needs_transform(place.sequence) for place in places):
        return None, None
    added = torch.zeros(len(places), columns.width, device=device)
    transform(added, places, columns)
    if all(place.sequence.params.repetition_penalty == 1.0 for place in places):
        return added, None
    return added, _repetition(places, columns, device)


def _repetition(places: Sequence[Place], columns: Columns, device: torch.device) -> Tensor:
    penalised = {s.id: s for s, _ in places if s.params.repetition_penalty != 1.0}
    seen = {name: list(columns.of(set(s.tokens))) for name, s in penalised.items()}  # once for all nodes
    at = [row * columns.width + column for row, (s, _) in enumerate(places) for column in seen.get(s.id, ())]
    penalties = [s.params.repetition_penalty for s, _ in places for _ in seen.get(s.id, ())]
    dense = torch.ones(len(places), columns.width, device=device)
    dense.view(-1).index_copy_(0, to_device(at, device), to_device(penalties, device, torch.float32))
    return dense


def noise_keys(places: Sequence[Place], count: int) -> Tensor:
    """Return the noise keys `[B, count, 2]` of the next tokens. Rows that are not seeded get some key."""
    return key_tensor(place_key(place, step) for place in places for step in range(count)).view(len(places), count, 2)


def place_key(place: Place, ahead: int = 0) -> tuple[int, int]:
    """Return the noise key of the token `ahead` tokens after a place, (0, 0) for sequences without a seed."""
    sequence = place.sequence
    if sequence.params.seed is None:
        return 0, 0
    return noise_key(sequence.params.seed, sequence.index, sequence.output_length + len(place.drafted) + ahead)
