"""When sources with likely nodes rest: to find and plan these nodes takes a share of a step."""

from __future__ import annotations

from distillspec.serving.base.backoff import Backoff
from distillspec.serving.base.running_mean import running_mean

LEAST_GAIN = 0.02  # of goodput. Sources that bring less rest, as do those that bring less than the share they take
SHARE_WEIGHT = 0.05  # of a step in the running means of what the sources take
GAIN_WEIGHT = 0.02  # of a plan in the running mean of their gain, which starts at twice the least one
REST_STEPS, MOST_REST_STEPS = 64, 1024  # the first rest, doubled with each that follows at once, and the longest
FORGET_SHARE = 1 / 512  # of the expected and written tokens, a step
PRIOR_TOKENS = 64.0  # expected and written, before any step


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
        self._rest = Backoff(REST_STEPS, MOST_REST_STEPS)
        # Tokens of steps without likely nodes, and of steps with them.
        self._expected = [PRIOR_TOKENS, PRIOR_TOKENS]
        self._written = [PRIOR_TOKENS, PRIOR_TOKENS]

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
            tokens[likely] += new - FORGET_SHARE * tokens[likely]

    def planned(self, share: float) -> None:
        """Learn the share that planning took of a step in which the sources could draft."""
        if self._share is None:
            self._gain = None
        self._share = running_mean(self._share, share, SHARE_WEIGHT)

    def took(self, outside_s: float, step_s: float) -> None:
        """Learn the seconds of all outside of passes of a step that speculated as it could."""
        self._awake_s = running_mean(self._awake_s, outside_s, SHARE_WEIGHT)
        self._step_s = step_s

    def rested(self, outside_s: float) -> None:
        """Learn the seconds outside of passes of a step at rest."""
        self._resting_s = running_mean(self._resting_s, outside_s, SHARE_WEIGHT)

    @property
    def share(self) -> float:
        """Share of a step that the sources take.

        It is what planning takes, and once steps were at rest what they take more outside of passes than those.
        """
        planning = self._share or 0.0
        if self._awake_s is None or self._resting_s is None:
            return planning
        return max(planning, (self._awake_s - self._resting_s) / self._step_s)

    def weigh(self, gain: float) -> bool:
        """Learn the sources' expected gain of goodput in a plan. Return False where they rest from now on."""
        if gain:
            # The best of several estimates is the most optimistic one: what steps with likely nodes wrote of the
            # expected tokens, over what the others did, corrects it.
            others, likely = [written / of for written, of in zip(self._written, self._expected, strict=True)]
            gain = (1 + gain) * likely / others - 1
        least = max(LEAST_GAIN, self.share)
        self._gain = running_mean(2 * least if self._gain is None else self._gain, gain, GAIN_WEIGHT)
        if self._gain >= least:
            self._rest.succeeded()
            return True
        self._rest.failed()
        self._gain = None
        return False
