"""Speculation policy: stops speculation that measurably does not pay, and retries it at a small cost."""

from __future__ import annotations

from distillspec.serving.costs.chain_batch import Expected
from distillspec.serving.costs.prediction_bias import PredictionBias

PLAIN_EVERY = 100  # speculating steps between two plain ones, which measure the cost of plain decoding
TRIALS_COST = 0.008  # share of all tokens that trials may lose where speculation does not pay
FIRST_TRIAL_COST = 2.0  # plain steps that the first trial of a draft may lose: nothing is known of it yet
TRY_EVERY = 10  # plain steps between two points where a trial may start
FEWEST_TRIED, MOST_TRIED = 4, 32  # steps of a trial. It continues until it has lost as much as its catch-up prefill
FEWEST_TO_JUDGE = 100  # speculating steps before speculation may be switched off


class SpeculationPolicy:
    """Measured gain of one draft's speculation, and the trials that follow from it.

    Goodputs are predicted tokens a second. Times are seconds.
    """

    def __init__(self) -> None:
        self._spec_tokens, self._spec_s, self._plain_s = PredictionBias(), PredictionBias(), PredictionBias()
        self.speculates = True  # not switched off
        self._steps = self._since_plain = self._since_speculation = 0
        self._was_tried = False
        self._tried, self._catch_up_s = 0, 0.0  # steps of the current trial, seconds of its catch-up prefill

    @property
    def gain(self) -> float:
        """Measured over predicted goodput of speculating steps, as far as their time is concerned.

        Tokens are predicted by an acceptance that is learnt from the same steps. Where it falls from text to text, the
        estimate lags, and its errors would count against speculation long after they were mended.
        """
        return 1.0 / max(self._spec_s.factor, 1e-9)

    @property
    def uncertainty(self) -> float:
        """Relative standard error of the measured goodput."""
        return (self._spec_tokens.relative_error**2 + self._spec_s.relative_error**2) ** 0.5

    def plain_rate(self, goodput: float) -> float:
        """Return the measured tokens a second without speculation, where `goodput` is predicted."""
        return goodput / max(self._plain_s.factor, 1e-9)

    @property
    def plain_is_due(self) -> bool:
        """True when plain decoding is due to be measured again."""
        return self._since_plain >= PLAIN_EVERY

    @property
    def trial_is_due(self) -> bool:
        """True during a trial, and when one may start."""
        if self._tried:
            return True
        return self._since_speculation % TRY_EVERY == 0 and (self._since_speculation > 0 or not self._was_tried)

    def affords(self, tried: Expected, nothing: Expected, catch_up_s: float) -> bool:
        """Return True if a trial starts or takes another step.

        It starts if its expected loss, catch-up prefill included, is a small share of the time since the last one; the
        first one if it is a few steps. It may then lose as much as its catch-up prefill took.
        """
        worth_s = tried.tokens / self.plain_rate(nothing.goodput)
        lost_s = tried.seconds * self._spec_s.factor - worth_s  # in a step, against plain steps for as many tokens
        if not self._tried:
            steps = TRIALS_COST * self._since_speculation if self._was_tried else FIRST_TRIAL_COST
            trial_s = catch_up_s + max(FEWEST_TRIED * lost_s, catch_up_s)
            return trial_s <= steps * nothing.seconds * self._plain_s.factor
        return self._tried < FEWEST_TRIED or (self._tried < MOST_TRIED and self._tried * lost_s <= self._catch_up_s)

    def step_passed(self, speculated: bool, trial_catch_up_s: float | None) -> None:
        """Count a step, measured or not.

        Args:
            speculated: True if it drafted tokens.
            trial_catch_up_s: seconds of catch-up prefill in a step of a trial, None for other steps.
        """
        self._steps += 1
        self._was_tried |= speculated
        self._since_plain = self._since_plain + 1 if speculated else 0
        self._since_speculation = 0 if speculated else self._since_speculation + 1
        if trial_catch_up_s is not None and not self._tried:
            self._catch_up_s = trial_catch_up_s
        self._tried = self._tried + (trial_catch_up_s is not None) if speculated else 0

    def saw(self, measured_s: float, predicted_s: float, prompts_s: float, tokens: tuple[float, float] | None) -> None:
        """Learn from a step.

        Prompts that it read are paid either way. Decoding gets the share of the step's error that it most probably has,
        since both are predicted equally well, relative to their own times. It also counts by this share.

        Args:
            measured_s: seconds of the whole step.
            predicted_s: those of decoding.
            prompts_s: those of reading prompts, predicted too.
            tokens: measured and predicted ones of a speculating step, None for a plain one.
        """
        bias = self._plain_s if tokens is None else self._spec_s
        expected = predicted_s * bias.factor
        share = expected**2 / max(expected**2 + prompts_s**2, 1e-18)
        decoding_s = expected + share * (measured_s - prompts_s - expected)
        bias.observe(max(0.0, decoding_s), predicted_s, self._steps, share)  # a time below 0 would be left out
        if tokens is not None:
            self._spec_tokens.observe(*tokens, self._steps)

    def judge(self, nothing: float, best: float) -> None:
        """Continue speculation if its measured goodput exceeds that of plain decoding by its own uncertainty.

        `nothing` and `best` are predicted goodputs: without speculation, and of the best lengths. Nothing is decided
        before enough speculating steps were measured.
        """
        if self._spec_s.seen >= FEWEST_TO_JUDGE:
            self.speculates = best * self.gain * (1 - self.uncertainty) > self.plain_rate(nothing)
