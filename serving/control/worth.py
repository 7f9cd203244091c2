"""Whether speculation is worth it, as measured: it stops where it is not, and is tried again for little."""

from __future__ import annotations

from distillspec.serving.control.allocation import Allocation
from distillspec.serving.control.missed import Missed

PLAIN_EVERY = 100  # speculating steps between two that do not, to see what not speculating costs
TRIALS_COST = 0.008  # share of all tokens that may be lost by speculating now and then where it does not pay
TRY_EVERY = 10  # plain steps after which, and after twice and three times so many, a trial is thought of
FEWEST_TRIED, MOST_TRIED = 4, 32  # steps of a trial: it goes on until it has lost as much as reading up did
FEWEST_TO_JUDGE = 100  # speculating steps before speculation may be switched off


class Worth:
    """What one draft's speculation is worth: predictions against measurements, and the trials that follow from them.

    Goodputs are predicted tokens a second; times in seconds.
    """

    def __init__(self) -> None:
        self._spec_tokens, self._spec_s, self._plain_s = Missed(), Missed(), Missed()
        self.speculates = True  # not switched off
        self._since_plain = self._since_speculation = 0
        self._tried, self._read_up_s = 0, 0.0  # steps of the trial that goes on; what reading up before it took

    @property
    def gain(self) -> float:
        """Measured goodput of speculating steps over what was predicted."""
        return self._spec_tokens.factor / max(self._spec_s.factor, 1e-9)

    @property
    def uncertainty(self) -> float:
        """Relative, of the measured goodput."""
        return (self._spec_tokens.relative_error**2 + self._spec_s.relative_error**2) ** 0.5

    def plain_rate(self, goodput: float) -> float:
        """Tokens a second without speculation, as measured, where so many are predicted."""
        return goodput / max(self._plain_s.factor, 1e-9)

    @property
    def plain_is_due(self) -> bool:
        """Whether not speculating was not measured for long."""
        return self._since_plain >= PLAIN_EVERY

    @property
    def trial_is_due(self) -> bool:
        """Whether a trial goes on, or one may be thought of."""
        return self._tried > 0 or (self._since_speculation > 0 and self._since_speculation % TRY_EVERY == 0)

    def affords(self, tried: Allocation, nothing: Allocation, read_up_s: float) -> bool:
        """Whether a trial begins or takes another step.

        It begins where what it will lose, reading up included, is a small share of the time since the last one, and may
        then lose as much as reading up took.
        """
        if not self._tried:
            lost_s = read_up_s + max(FEWEST_TRIED * self._lost_s(tried, nothing), read_up_s)
            return lost_s <= TRIALS_COST * self._since_speculation * nothing.seconds * self._plain_s.factor
        if self._tried < FEWEST_TRIED:
            return True
        return self._tried < MOST_TRIED and self._tried * self._lost_s(tried, nothing) <= self._read_up_s

    def step_passed(self, speculated: bool, trial_read_up_s: float | None) -> None:
        """A step is over, whether it told anything or not.

        trial_read_up_s: what the draft's reading up took in a step of a trial; None: it was none.
        """
        self._since_plain = self._since_plain + 1 if speculated else 0
        self._since_speculation = 0 if speculated else self._since_speculation + 1
        if not speculated:
            self._tried = 0
        elif trial_read_up_s is not None:
            if not self._tried:
                self._read_up_s = trial_read_up_s
            self._tried += 1
        for missed in (self._spec_tokens, self._spec_s, self._plain_s):
            missed.age()

    def saw_plain(self, measured_s: float, predicted_s: float) -> None:
        """What a step without speculation took."""
        self._plain_s.observe(measured_s, predicted_s)

    def saw_speculation(self, tokens: float, predicted_tokens: float, measured_s: float, predicted_s: float) -> None:
        """What a speculating step gave and took."""
        self._spec_tokens.observe(tokens, predicted_tokens)
        self._spec_s.observe(measured_s, predicted_s)

    @property
    def can_judge(self) -> bool:
        """Whether enough was seen."""
        return self._spec_s.seen >= FEWEST_TO_JUDGE

    def judge(self, nothing: float, best: float) -> None:
        """Speculation goes on where its measured goodput is above that of none by its own uncertainty.

        nothing, best: predicted goodput without speculation and of the best lengths.
        """
        self.speculates = best * self.gain * (1 - self.uncertainty) > self.plain_rate(nothing)

    def _lost_s(self, tried: Allocation, nothing: Allocation) -> float:
        """Seconds by which a step of a trial takes longer than plain ones for as many tokens, as far as is known."""
        worth_s = tried.tokens * self._spec_tokens.factor / self.plain_rate(nothing.goodput)
        return tried.seconds * self._spec_s.factor - worth_s
