"""Acceptance estimate: survival of drafted tokens by position, over all requests and for each.

A trial is a drafted token whose predecessors were all accepted. The hazard of position i is a Beta mean: the request's
own trials, and the global ones as a prior worth `strength` trials. Survival is the product. Both forget: text changes,
and drafts are swapped. Proposals of sources without a model are told apart by source and match (0: a model's).

Siblings of a chain's token are tried after it. Theirs are the hazards of a rank where those before it were rejected,
over all requests.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy

from distillspec.errors import ConfigError
from distillspec.serving.base.acceptance import RowResult, ranked_of_source
from distillspec.serving.base.rows import BEHIND, RowView, evidence, is_joined
from distillspec.types import Floats

PRIOR_TRIALS = 5.0  # trials that the prior is worth
POOLED_TRIALS = 20.0  # trials that all positions together are worth to each
SIBLING_HAZARD = 0.2  # hazard of a sibling before anything was seen
GLOBAL_ONLY_TRIALS = 1e30  # trials beside which a request's own vanish


class Evidence(NamedTuple):
    """Tried and accepted tokens by place. Lists: a step changes few places, for which numpy would take longer."""

    tried: list[float]
    accepted: list[float]

    @classmethod
    def none(cls, places: int) -> Evidence:
        """Return the evidence of so many places before anything was tried."""
        return cls([0.0] * places, [0.0] * places)

    def add(self, place: int, accepted: bool, stays: float) -> None:
        """Count a trial, of which `stays` of the place's older evidence are left."""
        self.tried[place] = stays * self.tried[place] + 1.0
        self.accepted[place] = stays * self.accepted[place] + accepted

    def scaled(self, ratio: float) -> Evidence:
        """Return what was tried, with `ratio` times as much of it accepted."""
        pairs = zip(self.tried, self.accepted, strict=True)
        return Evidence(self.tried, [min(accepted * ratio, tried) for tried, accepted in pairs])


class AcceptanceEstimate:
    """Acceptance of requests by name, at each position, learnt from results.

    Args:
        speculation_length: positions that are told apart.
        width: tokens of a position that may be tried, the chain's own and its siblings.
        prior: hazard assumed before anything was seen.
        strength: trials that the global estimate is worth beside a request's own; infinite: global only.
        memory: trials of a position after which a request's evidence has half its weight.
        global_memory: the same for the estimate over all requests.
    """

    def __init__(
        self,
        speculation_length: int,
        width: int = 1,
        *,
        prior: float = 0.6,
        strength: float = 30.0,
        memory: float = 60.0,
        global_memory: float = 500.0,
    ) -> None:
        if speculation_length < 0 or not 0 < prior < 1:
            raise ConfigError(
                f"speculation_length={speculation_length} must be at least 0, and prior={prior} between 0 and 1"
            )
        if strength <= 0 or memory <= 0 or global_memory <= 0:
            raise ConfigError(f"strength={strength}, memory={memory} and global_memory={global_memory} must be above 0")
        self.speculation_length = speculation_length
        self.width = width
        self.prior = prior
        self.strength = strength
        self._stays = 0.5 ** (1 / memory)  # share of a request's evidence, after a trial
        self._stays_globally = 0.5 ** (1 / global_memory)
        self.reset()

    def reset(self) -> None:
        """Forget everything: another draft."""
        self._nothing = Evidence.none(self.speculation_length)
        self._all: dict[Hashable, Evidence] = {}  # by kind
        self._hazards: dict[Hashable, Floats] = {}  # by kind, while nothing new is learnt
        self._by_request: dict[tuple[Hashable, str], Evidence] = {}  # by kind and request
        self._siblings = self._no_siblings()
        self._shares: Floats | None = None  # `sibling_shares`, while nothing new is learnt

    def _no_siblings(self) -> Evidence:
        """Return the evidence of a chain's siblings, by position and rank, before anything was tried."""
        return Evidence.none(self.speculation_length * (self.width - 1))

    def change_draft(self, ratio: float | None) -> None:
        """Expect `ratio` times the acceptance of an only draft, with what was tried as evidence. None: forget it.

        Sources without a model are as they were.
        """
        self.change(0, ratio)
        self._siblings = self._no_siblings() if ratio is None else self._siblings.scaled(ratio)
        self._shares = None

    def change(self, source: Hashable, ratio: float | None) -> None:
        """Expect `ratio` times the acceptance of one of several drafts, alone and behind others. None: forget it."""
        kinds = (source, (source, BEHIND))
        for kind in kinds:
            self._hazards.pop(kind, None)
            if (tried := self._all.pop(kind, None)) is not None and ratio is not None:
                self._all[kind] = tried.scaled(ratio)
        for key in [key for key in self._by_request if key[0] in kinds]:
            tried = self._by_request.pop(key)
            if ratio is not None:
                self._by_request[key] = tried.scaled(ratio)

    def sibling_shares(self) -> Floats:
        """Return P(sibling r of position i is accepted | the chain's token was rejected) `[positions, width − 1]`.

        Siblings are tried in turn. What no position has seen of a rank is taken from all of them.
        """
        if self._shares is None:
            tried, accepted = numpy.array(self._siblings).reshape(2, self.speculation_length, self.width - 1)
            pooled = (accepted.sum(0) + PRIOR_TRIALS * SIBLING_HAZARD) / (tried.sum(0) + PRIOR_TRIALS)
            hazards = (accepted + POOLED_TRIALS * pooled) / (tried + POOLED_TRIALS)
            reached = numpy.cumprod(1 - hazards, 1)
            self._shares = hazards * numpy.concatenate([numpy.ones((len(hazards), 1)), reached[:, :-1]], 1)
        return self._shares

    def chances(
        self,
        names: Sequence[str],
        kinds: Sequence[Hashable] | None = None,
        beliefs: Sequence[float | None] | None = None,
        *,
        optimism_se: float = 0.0,
    ) -> Floats:
        """Return P(the child of rank r at position i is accepted | its parent is) `[n, positions, width]`.

        Requests without evidence have the global one.

        Args:
            beliefs: P(accepted) of each request before its own trials, None where only the estimate over all is known.
            optimism_se: standard errors of the estimate over all requests to add to the chain's own.
        """
        if kinds is None:
            kinds = [0] * len(names)
        chain = self._chain_hazards(names, kinds, beliefs)
        if optimism_se:
            standard_errors = numpy.array([self._mean(kind)[1] for kind in kinds]).reshape(-1, 1)
            chain = numpy.minimum(1.0, chain + optimism_se * standard_errors)
        if self.width == 1:
            return chain[..., None]
        return numpy.concatenate([chain[..., None], (1 - chain)[..., None] * self.sibling_shares()], 2)

    def of_rows(self, rows: Sequence[RowView], *, optimism_se: float = 0.0) -> Floats:
        """Return `chances` of rows, each with the source that drafts for it."""
        names = [row.sequence_id for row in rows]
        kinds = list(map(evidence, rows))
        beliefs = [row.belief for row in rows]
        known_beliefs = None if all(belief is None for belief in beliefs) else beliefs
        return self.chances(names, kinds if any(kinds) else None, known_beliefs, optimism_se=optimism_se)

    def hazards(self, kind: Hashable = 0) -> Floats:
        """Return P(position i is accepted | those before it were) over all requests, `[speculation_length]`.

        Late positions are seldom tried: until they are, they are taken for like the others.
        """
        if kind not in self._hazards:
            tried, accepted = numpy.array(self._all.get(kind, self._nothing))
            self._hazards[kind] = (accepted + POOLED_TRIALS * self._mean(kind)[0]) / (tried + POOLED_TRIALS)
        return self._hazards[kind]

    def _mean(self, kind: Hashable) -> tuple[float, float]:
        """Return P(a token is accepted) of a kind, over all requests and positions, and its standard error."""
        tried, accepted = map(sum, self._all.get(kind, self._nothing))
        mean = (accepted + PRIOR_TRIALS * self.prior) / (tried + PRIOR_TRIALS)
        return mean, (mean * (1 - mean) / (tried + PRIOR_TRIALS)) ** 0.5

    def _chain_hazards(
        self, names: Sequence[str], kinds: Sequence[Hashable], beliefs: Sequence[float | None] | None
    ) -> Floats:
        """Return P(position i is accepted | those before it were) of each request `[n, positions]`."""
        strength = min(self.strength, GLOBAL_ONLY_TRIALS)
        pooled = numpy.array([self.hazards(kind) for kind in kinds]).reshape(len(kinds), self.speculation_length)
        if beliefs is not None:
            pairs = zip(kinds, beliefs, strict=True)
            scale = [1.0 if belief is None else belief / self._mean(kind)[0] for kind, belief in pairs]
            pooled = numpy.clip(pooled * numpy.array(scale)[:, None], 0.0, 1.0)
        trials = [self._by_request.get(key, self._nothing) for key in zip(kinds, names, strict=True)]
        tried, accepted = numpy.array(trials).reshape(len(trials), 2, self.speculation_length).swapaxes(0, 1)
        hazards: Floats = (accepted + strength * pooled) / (tried + strength)
        return hazards

    def learn(self, rows: Sequence[RowResult], views: Sequence[RowView]) -> None:
        """Count the trials of a step's rows, but for those of sources with likely nodes with chances of their own.

        Args:
            views: as rows were planned for.
        """
        by_id = {view.sequence_id: view for view in views}
        counted, kinds = list[RowResult](), list[Hashable]()
        for row in rows:
            view = by_id.get(row.sequence_id)
            if view is None or view.likely is None:
                counted.append(row)
                kinds.append(0 if view is None else evidence(view))
            elif is_joined(view):
                counted.append(row._replace(trials=ranked_of_source(row.trials, view.source)))
                kinds.append(evidence(view))
        self.observe(counted, kinds)

    def observe(self, rows: Sequence[RowResult], kinds: Sequence[Hashable] | None = None) -> None:
        """Count the trials of a step's rows. Rows without drafted tokens have none."""
        for kind, row in zip(kinds or [0] * len(rows), rows, strict=True):
            if row.trials and self.speculation_length:
                self._count(row, kind)

    def _count(self, row: RowResult, kind: Hashable) -> None:
        if (of_request := self._by_request.get(key := (kind, row.sequence_id))) is None:
            of_request = self._by_request[key] = Evidence.none(self.speculation_length)
        if (of_all := self._all.get(kind)) is None:
            of_all = self._all[kind] = Evidence.none(self.speculation_length)
        self._hazards.pop(kind, None)
        for depth, rank, _, accepted in row.trials:
            if depth > self.speculation_length or rank >= self.width:
                continue
            if rank == 0:
                of_request.add(depth - 1, accepted, self._stays)
                of_all.add(depth - 1, accepted, self._stays_globally)
                continue
            self._siblings.add((depth - 1) * (self.width - 1) + rank - 1, accepted, self._stays_globally)
            self._shares = None

    def keep_only(self, names: Sequence[str]) -> None:
        """Drop requests that are not among `names`."""
        alive = set(names)
        self._by_request = {key: tried for key, tried in self._by_request.items() if key[1] in alive}

    def __len__(self) -> int:
        """Requests that have evidence of their own, and of how many kinds."""
        return len(self._by_request)
