"""How likely drafted tokens are to stand: survival by position, from every trial, for all requests and for each.

A trial is a drafted token whose predecessors all stood; what lies behind a rejection was never tried and says nothing
(SmartSpec's α counted otherwise is too low, see `formulas.md`'s censoring). The hazard of position i is a Beta mean:
the request's own trials, and the global ones as a prior worth `strength` trials; survival is the product. Both forget:
text changes, and drafts are swapped.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy
from numpy.typing import NDArray

from distillspec.errors import ConfigError
from distillspec.serving.control.base import RowResult

IMAGINED = 2.0  # trials that the prior is worth
POOLED = 20.0  # trials that all positions together are worth to each

Floats = NDArray[numpy.float64]


class AcceptanceEstimate:
    """Survival `[n, longest]` of requests by name; observe with results, ask with `survival`.

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
        self._forget, self._forget_globally = 0.5 ** (1 / memory), 0.5 ** (1 / global_memory)
        self._places: dict[str, int] = {}
        self._free: list[int] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything: another draft."""
        self._places.clear()
        self._free.clear()
        self._own = numpy.zeros((2, 0, self.longest))  # tried, accepted
        self._all = numpy.zeros((2, self.longest))

    @property
    def hazards(self) -> Floats:
        """P(position i stands, given that those before it stood) over all requests, `[longest]`.

        Late positions are seldom tried: until they are, they are taken for like the others.
        """
        tried, accepted = self._all
        pooled = (accepted.sum() + IMAGINED * self.prior) / (tried.sum() + IMAGINED)
        return numpy.asarray((accepted + POOLED * pooled) / (tried + POOLED), dtype=numpy.float64)

    @property
    def trials(self) -> float:
        """Trials of the first position that the global estimate rests on now."""
        return float(self._all[0][0]) if self.longest else 0.0

    def survival(self, names: Seq[str]) -> Floats:
        """P(the first 1 … longest drafted tokens all stand), `[n, longest]`; the global one without evidence."""
        pooled = self.hazards
        tried, accepted = numpy.zeros((2, len(names), self.longest))
        places = numpy.array([self._places.get(name, -1) for name in names], dtype=numpy.int64)
        known = places >= 0
        tried[known], accepted[known] = self._own[:, places[known]]
        if numpy.isinf(self.strength):
            hazards = numpy.broadcast_to(pooled, tried.shape)
        else:
            hazards = (accepted + self.strength * pooled) / (tried + self.strength)
        return numpy.asarray(numpy.cumprod(hazards, 1), dtype=numpy.float64)

    def observe(self, rows: Seq[RowResult]) -> None:
        """Count the trials of a step's rows; rows without drafted tokens tell nothing."""
        rows = [row for row in rows if row.proposed > 0]
        if not rows or not self.longest:
            return
        accepted = numpy.array([row.accepted for row in rows])[:, None]
        proposed = numpy.array([row.proposed for row in rows])[:, None]
        position = numpy.arange(self.longest)
        tried = (position < numpy.minimum(accepted + 1, proposed)).astype(float)
        stood = (position < accepted).astype(float)
        places = [self._place(row.sequence_id) for row in rows]
        kept = numpy.where(tried > 0, self._forget, 1.0)
        self._own[0, places] = kept * self._own[0, places] + tried
        self._own[1, places] = kept * self._own[1, places] + stood
        kept_globally = self._forget_globally ** tried.sum(0)
        self._all = kept_globally * self._all + numpy.stack([tried.sum(0), stood.sum(0)])

    def keep_only(self, names: Seq[str]) -> None:
        """Drop requests that are not among `names`."""
        alive = set(names)
        for name in [name for name in self._places if name not in alive]:
            place = self._places.pop(name)
            self._own[:, place] = 0
            self._free.append(place)

    def __len__(self) -> int:
        """Requests that have evidence of their own."""
        return len(self._places)

    def _place(self, name: str) -> int:
        if name not in self._places:
            if not self._free:
                old = self._own.shape[1]
                more = max(16, old)
                self._own = numpy.concatenate([self._own, numpy.zeros((2, more, self.longest))], 1)
                self._free.extend(range(old + more - 1, old - 1, -1))
            self._places[name] = self._free.pop()
        return self._places[name]
