"""Measured gain of speculation: how far steps with it and without take longer, or write less, than was predicted."""

from __future__ import annotations

from distillspec.serving.costs.prediction_bias import PredictionBias


class MeasuredGain:
    """Errors of the predictions for speculating and plain steps.

    Goodputs are predicted tokens a second. Times are seconds.

    Attributes:
        steps: that have passed. What was seen is forgotten by their number.
    """

    def __init__(self) -> None:
        self._spec_tokens = PredictionBias()
        self._spec_s = PredictionBias()
        self._plain_s = PredictionBias()
        self.steps = 0

    @property
    def seen(self) -> float:
        """Speculating steps that were measured, each as far as it told of its own time."""
        return self._spec_s.seen

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
    def slower(self) -> tuple[float, float]:
        """Measured over predicted seconds of speculating and of plain steps."""
        return self._spec_s.factor, self._plain_s.factor

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
        bias.observe(max(0.0, decoding_s), predicted_s, self.steps, share)  # a time below 0 would be left out
        if tokens is not None:
            self._spec_tokens.observe(*tokens, self.steps)
