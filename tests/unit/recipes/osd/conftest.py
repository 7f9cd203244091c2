"""A recorded answer for the study's tests."""

from __future__ import annotations

import torch

from distillspec.models import LanguageModel
from distillspec.recording import top_signal
from distillspec.serving.online.log.records import LoggedAnswer
from distillspec.signals import TeacherSignal
from distillspec.types import SamplingPolicy

TOKENS = 40


def logged(target: LanguageModel, entries: int) -> LoggedAnswer:
    ids = torch.randint(3, 250, (6 + TOKENS,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.no_grad():
        best, logprobs, tail, *_ = top_signal(target.logits(torch.tensor([ids]))[0, 5:-1], entries)
    nothing = torch.full((TOKENS,), torch.nan, dtype=torch.float16)
    return LoggedAnswer(
        request_id="0/a/1",
        index=0,
        tenant="default",
        domain="a",
        policy=SamplingPolicy(),
        time_s=1.0,
        finished=False,
        prompt_ids=tuple(ids[:6]),
        response_ids=tuple(ids[6:]),
        signal=TeacherSignal("topk", best.int(), logprobs.half(), tail),
        policy_logprobs=nothing,
        policy_log_z=nothing,
        outcomes=torch.zeros(TOKENS, dtype=torch.uint8),
        draft_tokens=torch.zeros(TOKENS, dtype=torch.int32),
        draft_probs=nothing,
        draft_entropies=nothing,
        draft_versions=("one",),
        version_of=torch.zeros(TOKENS, dtype=torch.uint8),
    )
