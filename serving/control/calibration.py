"""Costs that follow the machine: recursive least squares with forgetting on live step times."""

from __future__ import annotations

from dataclasses import replace

import numpy
from numpy.typing import NDArray
from scipy.optimize import nnls

from distillspec.errors import ConfigError
from distillspec.serving.control.latency import ForwardCost
from distillspec.serving.control.prediction_bias import OutlierClip

SCALE = (1000.0, 10.0, 1.0)  # typical contexts, tokens and passes of a pair
EXPERTS = 10.0  # and experts
ALERT, SOLVE_EVERY = 64, 16  # the first pairs are taken in at once, later ones by so many
LASTING = 0.05  # pairs that the prior is always worth
KEPT = 8.0  # pairs that each kind of pair (with prompts alone, without, with both) keeps while only others come

Floats = NDArray[numpy.float64]


class _Sums:
    """Weighted sums of work times work and work times seconds, over pairs of one kind."""

    def __init__(self, squares: Floats, products: Floats) -> None:
        self.squares, self.products, self.weight = squares, products, 0.0

    def fade(self, factor: float, kept: float = 0.0) -> None:
        """Multiply by `factor`, but keep the weight of `kept` pairs."""
        factor = max(factor, min(1.0, kept / self.weight)) if kept else factor
        self.squares, self.products, self.weight = factor * self.squares, factor * self.products, factor * self.weight

    def add(self, work: Floats, seconds: Floats, weight: Floats, size: Floats) -> None:
        """Add pairs of scaled work `[n, w]`, each divided by its size."""
        self.squares = self.squares + (work.T * (weight / size)) @ work
        self.products = self.products + work.T @ (weight / size * seconds)
        self.weight += float(weight.sum())


class CostCalibration:
    """The coefficients of one model's `ForwardCost`, from (work, seconds) pairs. A pair may hold several passes.

    Recursive least squares with forgetting in its information form (Ljung 1999, ch. 11): weighted sums of work times
    work and work times seconds, solved with no coefficient below 0. The prior stays in the sums with a little weight,
    and decides what the pairs do not tell apart (tokens from passes, where all rows draft alike). What the prior's
    line is known to be off by (`bumps`) is one more kind of work: its coefficient, 1 at first, says how large the bumps
    are now. A residual far beyond the usual is cut: a pause of the machine is no new machine.

    With `prompts`, a pair may also hold a pass over prompts, whose tokens and pass are two more kinds of work. Pairs
    that hold one of the two passes tell their costs apart, so a few are kept while only pairs with both come. If every
    pair ever held prompts, the two fixed costs cannot be told apart; the prior then splits them in half.

    Args:
        prior: the profile's coefficients, or a guess.
        confidence: pairs that the prior is worth at first.
        forgetting: weight of a pair after the next one.
        prompts: the prior of a pass over prompts (`per_context` unused); None: pairs never hold one.
    """

    def __init__(
        self,
        prior: ForwardCost,
        *,
        confidence: float = 20.0,
        forgetting: float = 0.99,
        prompts: ForwardCost | None = None,
    ) -> None:
        if not 0 < forgetting <= 1:
            raise ConfigError(f"forgetting={forgetting} must be in (0, 1]")
        if confidence <= 0:
            raise ConfigError(f"confidence={confidence} must be above 0")
        self.forgetting = forgetting
        self._shape, self._with_prompts = prior, prompts is not None
        known, scale = [prior.per_context, prior.per_token, prior.fixed], list(SCALE)
        if prior.experts:
            known.append(prior.per_expert)
            scale.append(EXPERTS)
        if prior.bumps:
            known.append(1.0)
            scale.append(max(1e-6, *(abs(seconds) for _, seconds in prior.bumps)))
        if prompts is not None:
            known += [prompts.per_token, prompts.fixed]
            scale += [SCALE[1], SCALE[2]]
        self._scale = numpy.array(scale)
        self._prior = numpy.array(known) * self._scale
        self._lasting = min(confidence, 1.0) * LASTING
        self._eye = numpy.eye(len(self._scale))
        self._before = _Sums(confidence * self._eye, confidence * self._prior)
        self._kinds: dict[tuple[bool, bool], _Sums] = {}  # by whether pairs decode, and read prompts
        self._theta = self._prior.copy()
        self._cost = prior
        self._cut, self._cut_with_prompts = OutlierClip(), OutlierClip()
        self._pairs = 0
        self._new: list[list[float]] = []  # not in the sums yet

    @property
    def cost(self) -> ForwardCost:
        """The present estimate."""
        return self._cost

    @property
    def prompts(self) -> ForwardCost | None:
        """The present estimate of a pass over prompts, None if pairs never hold one."""
        if not self._with_prompts:
            return None
        per_token, fixed = (self._theta / self._scale)[-2:].tolist()
        return ForwardCost(0.0, per_token, fixed)

    def _as_cost(self) -> ForwardCost:
        context, token, fixed, *others = (self._theta / self._scale).tolist()
        per_expert = others.pop(0) if self._shape.experts else 0.0
        bumps = tuple([(tokens, others[0] * seconds) for tokens, seconds in self._shape.bumps])
        return replace(
            self._shape, per_context=context, per_token=token, fixed=fixed, per_expert=per_expert, bumps=bumps
        ).rising()

    def observe(self, context: float, tokens: float, passes: float, seconds: float, prompts: float = 0) -> None:
        """Learn that `passes` passes over `tokens` tokens with `context` tokens cached took `seconds`, with one more
        over `prompts` tokens of prompts.

        Times that no clock should give (negative, not finite) are left out.
        """
        if (passes <= 0 and not prompts) or not 0 <= seconds < float("inf"):
            return
        each = tokens / max(passes, 1)
        work = [context, tokens, passes]
        if self._shape.experts:
            work.append(passes * self._shape.loaded_experts(each))
        if self._shape.bumps:
            work.append(passes * self._shape.bump_s(each))
        if self._with_prompts:
            work += [prompts, min(prompts, 1)]
        self._new.append([*work, seconds])
        self._pairs += 1
        if self._pairs <= ALERT or self._pairs % SOLVE_EVERY == 0:
            self._take_in(numpy.array(self._new))
            self._new.clear()
            self._solve()

    def _take_in(self, pairs: Floats) -> None:
        """Add pairs `[n, work and seconds]` to the sums, old to new."""
        scaled, seconds = pairs[:, :-1] / self._scale, pairs[:, -1]
        expected = scaled @ self._theta
        cuts = [self._cut_with_prompts if self._with_prompts and pair[-1] else self._cut for pair in scaled.tolist()]
        residuals = zip(cuts, (seconds - expected).tolist(), strict=True)
        cut = expected + numpy.array([cut(residual) for cut, residual in residuals])
        size = numpy.maximum(1.0, (scaled**2).sum(1))  # large steps are not worth more than small ones
        age = self.forgetting ** numpy.arange(len(pairs))[::-1]
        self._before.fade(self.forgetting ** len(pairs))
        for kind in self._kinds.values():
            kind.fade(self.forgetting ** len(pairs), KEPT)
        reads = scaled[:, -1] > 0 if self._with_prompts else numpy.zeros(len(pairs), dtype=bool)
        for decodes, prompts in {(True, False), (False, True), (True, True)}:
            chosen = ((scaled[:, 2] > 0) == decodes) & (reads == prompts)
            if chosen.any():
                kind = self._kinds.setdefault((decodes, prompts), _Sums(0 * self._eye, 0 * self._prior))
                kind.add(scaled[chosen], cut[chosen], age[chosen], size[chosen])

    def _solve(self) -> None:
        sums = [self._before, *self._kinds.values()]
        squares = self._lasting * self._eye + sum(kind.squares for kind in sums)
        products = self._lasting * self._prior + sum(kind.products for kind in sums)
        self._theta = numpy.linalg.solve(squares, products)
        if self._theta.min() < 0:  # else the free optimum is the bounded one
            root = numpy.linalg.cholesky(squares)
            self._theta, _ = nnls(root.T, numpy.linalg.solve(root, products))
        self._cost = self._as_cost()
