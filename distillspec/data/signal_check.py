"""A look at recorded signals: they must be what the target says of the same text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from distillspec.data.collect import SCORED_ROWS, response_logits
from distillspec.data.shards import read_samples
from distillspec.errors import ConfigError
from distillspec.models.language_model import LanguageModel
from distillspec.sampling import policy_probs
from distillspec.signals import TeacherSignal
from distillspec.types import Sample, SamplingPolicy

CHECKED = 6  # samples
READ, FEWEST = 32, 64  # samples whose text is looked at, and the fewest tokens that say anything
UNLIKELY = 0.05  # nats a token, beyond four standard errors
RULED_OUT = 0.2  # share of the tokens that a policy rules out, from which text is another's
FAR = 0.2  # nats. bfloat16 is .04 off float32. A text that was read at wrong positions is .4 off and more


def strange_signals(samples: Sequence[Sample], target: LanguageModel) -> str | None:
    """Return a line if recorded log-probabilities are not those of a pass over the text, None if they are.

    The first samples with compressed signals are looked at. Drafts would learn another distribution unnoticed: their
    acceptance on text of the same fault is as high as on sound text.
    """
    checked = [sample for sample in samples if isinstance(sample.signal, TeacherSignal) and len(sample.signal)]
    if not checked:
        return None
    off = float(torch.cat([_errors(sample, target) for sample in checked[:CHECKED]]).median())
    if off <= FAR:
        return None
    return f"recorded log-probabilities are {off:.2f} nats off what {target.name} says of the same text"


def read_checked(folder: Path, target: LanguageModel, setting: str, state_bytes: float = 0) -> list[Sample]:
    """Return the samples of a folder that a setting names. See `read_samples`.

    Args:
        setting: its name, for the message.

    Raises:
        ConfigError: as `read_samples`, or signals are not the target's: early versions wrote such on CPUs.
    """
    samples = read_samples(folder, target.identity, state_bytes, setting)
    if strange := strange_signals(samples, target):
        raise ConfigError(f"{setting}: {strange}; write the text again, and name no run with this one")
    return samples


@torch.no_grad()
def strange_text(samples: Sequence[Sample], target: LanguageModel, policy: SamplingPolicy) -> str | None:
    """Return a line if text is not the target's own under a policy, None if it is.

    Of the target's own text the mean surprise is the mean entropy. Tokens that a filter rules out are left out, since
    passes round differently. Greedy text has neither surprise nor entropy, so its ruled-out tokens alone decide.
    """
    excess = list[Tensor]()
    for sample in [sample for sample in samples if sample.response_ids][:READ]:
        for logits, ids in zip(
            response_logits(sample, target), torch.tensor(sample.response_ids).split(SCORED_ROWS), strict=True
        ):
            probs = policy_probs(target.full_width(logits).float(), policy).cpu()
            of_text = probs.gather(1, ids[:, None])[:, 0]
            excess.append(-of_text.log() - torch.special.entr(probs).sum(1))  # infinite where ruled out
    every = torch.cat(excess) if excess else torch.zeros(0)
    if len(every) < FEWEST:
        return None
    finite = every[every.isfinite()]
    ruled_out = 1 - len(finite) / len(every)
    if ruled_out > RULED_OUT:
        return f"{target.name} would never write {ruled_out:.0%} of these tokens under the policy"
    least = float(finite.mean() - 4 * finite.std() / len(finite) ** 0.5)
    return f"the text is {float(finite.mean()):.2f} nats a token off {target.name}'s own" if least > UNLIKELY else None


@torch.no_grad()
def _errors(sample: Sample, target: LanguageModel) -> Tensor:
    """Return the distance of each recorded log-probability from the target's, `[T · K]`."""
    assert isinstance(sample.signal, TeacherSignal)
    recorded = sample.signal.ids.long().split(SCORED_ROWS)
    parts = zip(response_logits(sample, target), recorded, strict=True)
    logprobs = [target.full_width(logits).log_softmax(-1).cpu().gather(1, ids) for logits, ids in parts]
    return (torch.cat(logprobs) - sample.signal.logprobs.float()).abs().flatten()
