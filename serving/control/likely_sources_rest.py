"""When sources with likely nodes rest: to find and plan these nodes takes a share of a step."""

from __future__ import annotations

from distillspec.serving.base.backoff import Backoff

# The share is of running means, and at least `PAYS`. It is what planning takes, and once steps were at rest what is
# more outside of passes than then. Sources that bring less rest for some steps, then for twice as many. Their gain is a
# running mean, too, from twice that share on.
PAYS, SHARE, GAIN = 0.02, 0.05, 0.02
REST, MOST_REST = 64, 1024
# The best of several estimates is the most optimistic one. So a gain is corrected by what steps with likely nodes wrote
# of the tokens that were expected, over what the others did. Both means forget, and start from so many tokens.
FORGET, SURE = 1 / 512, 64.0


class LikelySourcesRest:
    """Weighs what the sources bring against what they cost, for batches of like numbers of rows."""

    def __init__(self) -> None:
        self._share: float | None = None  # of a step, to find nodes and to plan
        self._awake_s: float | None = None  # seconds outside of passes, of steps whose sources may draft
        self._resting_s: float | None = None  # and of others
        self._step_s = 0.0
        self.drop()

    def drop(self) -> None:
        """Forget the gain, and end a rest: the draft, or the costs, are others."""
        self._gain: float | None = None  # of goodput, by the sources
        self._rest = Backoff(REST, MOST_REST)
        self._expected, self._written = [SURE, SURE], [SURE, SURE]  # tokens of steps without likely nodes, and with

    @property
    def rests(self) -> bool:
        """True while the sources are left out."""
        return self._rest.waits

    def step(self) -> None:
        """Count a step."""
        self._rest.step()

    def wrote(self, expected: float, written: float, *, likely: bool) -> None:
        """Learn from the tokens of a speculating step, with likely nodes or without."""
        for tokens, new in ((self._expected, expected), (self._written, written)):
            tokens[likely] += new - FORGET * tokens[likely]

    def planned(self, share: float) -> None:
        """Learn the share that planning took of a step in which the sources could draft."""
        if self._share is None:
            self._gain = None
        self._share = _mean(self._share, share)

    def took(self, outside_s: float, step_s: float) -> None:
        """Learn the seconds of all outside of passes of a step that speculated as it could."""
        self._awake_s, self._step_s = _mean(self._awake_s, outside_s), step_s

    def rested(self, outside_s: float) -> None:
        """Learn the seconds outside of passes of a step at rest."""
        self._resting_s = _mean(self._resting_s, outside_s)

    @property
    def share(self) -> float:
        """Share of a step that the sources take."""
        planning = self._share or 0.0
        if self._awake_s is None or self._resting_s is None:
            return planning
        return max(planning, (self._awake_s - self._resting_s) / self._step_s)

    def weigh(self, gain: float) -> bool:
        """Learn the sources' expected gain of goodput in a plan. Return False where they rest from now on."""
        if gain:
            others, likely = [own / of for own, of in zip(self._written, self._expected, strict=True)]
            gain = (1 + gain) * likely / others - 1
        least = max(PAYS, self.share)
        before = 2 * least if self._gain is None else self._gain
        self._gain = before + GAIN * (gain - before)
        if self._gain >= least:
            self._rest.succeeded()
            return True
        self._rest.failed()
        self._gain = None
        return False


def _mean(before: float | None, new: float) -> float:
    return new if before is None else before + SHARE * (new - before)
