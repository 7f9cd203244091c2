"""Acceptance estimate: survival of drafted tokens by position, over all requests and for each.

A trial is a drafted token whose predecessors were all accepted. Tokens behind a rejection were never tried
(SmartSpec's α counted otherwise is too low, see `formulas.md`'s censoring). The hazard of position i is a Beta mean:
the request's own trials, and the global ones as a prior worth `strength` trials. Survival is the product. Both forget:
text changes, and drafts are swapped. A lookup's proposals are told apart by the length of their match (0: a model's).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

from distillspec.errors import ConfigError
from distillspec.serving.control.base import RowResult

IMAGINED = 2.0  # trials that the prior is worth
POOLED = 20.0  # trials that all positions together are worth to each

Floats = NDArray[numpy.float64]


class AcceptanceEstimate:
    """Survival `[n, longest]` of requests by name, learnt from results.

    Args:
        longest: positions that are told apart.
        prior: hazard assumed before anything was seen.
        strength: trials that the global estimate is worth beside a request's own; infinite: global only.
        memory: trials of a position after which a request's evidence has half its weight.
        global_memory: the same for the estimate over all requests.
    """

    def __init__(
        self,
        longest: int,
        *,
        prior: float = 0.6,
        strength: float = 30.0,
        memory: float = 60.0,
        global_memory: float = 500.0,
    ) -> None:
        if longest < 0:
            raise ConfigError(f"longest={longest} must be at least 0")
        if not 0 < prior < 1:
            raise ConfigError(f"prior={prior} must be between 0 and 1")
        if strength <= 0 or memory <= 0 or global_memory <= 0:
            raise ConfigError(f"strength={strength}, memory={memory} and global_memory={global_memory} must be above 0")
        self.longest, self.prior, self.strength = longest, prior, strength
        self._first = numpy.tri(longest + 1, longest, -1)  # row c: 1 for the first c positions
        self._forgetting = 1 - (1 - 0.5 ** (1 / memory)) * self._first  # row c: what of old evidence stays, c tried
        self._forget_globally = 0.5 ** (1 / global_memory)
        self._places: dict[int, dict[str, int]] = {}  # by match and request
        self._hazards: dict[int, Floats] = {}  # by match, while nothing new is learnt
        self._free: list[int] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything: another draft."""
        self._places.clear()
        self._free.clear()
        self._hazards.clear()
        self._own = numpy.zeros((2, 1, self.longest))  # tried, accepted. The first place is for unknown requests
        self._all = {0: [[0.0] * self.longest] * 2}  # length of the match → tried, accepted

    @property
    def hazards(self) -> Floats:
        """P(position i is accepted | those before it were) over all requests, `[longest]`."""
        return self.hazards_at(0)

    def hazards_at(self, match: int) -> Floats:
        """The same for proposals of one match length.

        Late positions are seldom tried: until they are, they are taken for like the others.
        """
        if match not in self._hazards:
            tried, accepted = self._all.get(match, [[0.0] * self.longest] * 2)
            pooled = (sum(accepted) + IMAGINED * self.prior) / (sum(tried) + IMAGINED)
            hazards = [(a + POOLED * pooled) / (t + POOLED) for t, a in zip(tried, accepted, strict=True)]
            self._hazards[match] = numpy.array(hazards)
        return self._hazards[match]

    @property
    def trials(self) -> float:
        """Trials of the first position that the global estimate rests on now."""
        return float(sum(tried[0] for tried, _ in self._all.values())) if self.longest else 0.0

    def survival(self, names: Sequence[str], matches: Sequence[int] | None = None) -> Floats:
        """Return P(the first 1 … longest drafted tokens are all accepted) `[n, longest]`.

        Requests without evidence have the global one.
        """
        if matches and len(set(matches)) > 1:
            pooled = numpy.array([self.hazards_at(match) for match in matches])
            places = [self._places.get(match, {}).get(name, 0) for name, match in zip(names, matches, strict=True)]
        else:
            match = matches[0] if matches else 0
            pooled, own = self.hazards_at(match), self._places.get(match, {})
            places = [own.get(name, 0) for name in names]
        if self.strength == float("inf"):
            return numpy.tile(pooled, (len(names), 1)).cumprod(1) if pooled.ndim == 1 else pooled.cumprod(1)
        tried, accepted = self._own.take(places, 1)
        survival: Floats = ((accepted + self.strength * pooled) / (tried + self.strength)).cumprod(1)
        return survival

    def observe(self, rows: Sequence[RowResult], matches: Sequence[int] | None = None) -> None:
        """Count the trials of a step's rows. Rows without drafted tokens have none."""
        for match in sorted(set(matches)) if matches else [0]:
            alike = [row for i, row in enumerate(rows) if row.trials and (not matches or matches[i] == match)]
            if alike and self.longest:
                self._observe(alike, match)

    def _observe(self, rows: Sequence[RowResult], match: int) -> None:
        self._hazards.pop(match, None)
        own = self._places.setdefault(match, {})
        places = [own[row.sequence_id] if row.sequence_id in own else self._place(own, row.sequence_id) for row in rows]
        tried = [min(row.tried, self.longest) for row in rows]
        counted = self._first[[tried, [min(row.kept, self.longest) for row in rows]]]  # [2, n, longest]
        self._own[:, places] = self._own[:, places] * self._forgetting[tried] + counted
        self._all[match] = self._together(match, *counted.sum(1).tolist())

    def _together(self, match: int, tried: list[float], accepted: list[float]) -> list[list[float]]:
        """Add trials to those over all requests. Uses lists, since arrays of a few numbers are slower."""
        before = self._all.get(match, [[0.0] * self.longest] * 2)
        stays = [self._forget_globally**trials for trials in tried]
        return [
            [share * old + new for share, old, new in zip(stays, olds, news, strict=True)]
            for olds, news in zip(before, (tried, accepted), strict=True)
        ]

    def keep_only(self, names: Sequence[str]) -> None:
        """Drop requests that are not among `names`."""
        alive = set(names)
        for own in self._places.values():
            for name in own.keys() - alive:
                place = own.pop(name)
                self._own[:, place] = 0
                self._free.append(place)

    def __len__(self) -> int:
        """Requests that have evidence of their own, and by how many match lengths."""
        return sum(map(len, self._places.values()))

    def _place(self, own: dict[str, int], name: str) -> int:
        """Room for a new request's evidence, noted in `own`."""
        if not self._free:
            old = self._own.shape[1]
            more = max(16, old)
            self._own = numpy.concatenate([self._own, numpy.zeros((2, more, self.longest))], 1)
            self._free.extend(range(old + more - 1, old - 1, -1))
        own[name] = self._free.pop()
        return own[name]
