"""Training text behind drafted tokens that were not accepted: the target's distribution there is in the log."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.nn.functional import pad

from distillspec.serving.online.log.records import LoggedAnswer
from distillspec.serving.online.log.rejected_nodes import Branch
from distillspec.signals import TeacherSignal
from distillspec.types import Sample


def branches_of(
    answers: Sequence[LoggedAnswer], scales: Mapping[str, float], seed: int
) -> Iterator[tuple[Sample, torch.Tensor, float]]:
    """Yield text, weights and scale of branches of answers, in random order.

    A branch begins with its answer's text up to the position where it leaves it, and that text is read once more. There
    are no more branches once they have as many tokens as the answers. A node that several branches share has a weight
    in one of them.

    Args:
        scales: tenant → weight of its tokens.
    """
    room = sum(len(answer.prompt_ids) + len(answer) for answer in answers)
    branches = [(each, branch) for each in answers if each.nodes is not None for branch in each.nodes.branches()]
    random.Random(seed).shuffle(branches)
    for answer, branch in branches:
        sample = branch_sample(answer, branch)
        room -= len(sample)
        if room < 0:
            return
        weights = torch.ones(len(branch.nodes))
        weights[: branch.new] = 0
        yield sample, weights, scales[answer.tenant]


def branch_sample(answer: LoggedAnswer, branch: Branch) -> Sample:
    """Return a branch as text: row t of the signal is the distribution behind node t.

    The first node ends the prompt. The last response token is the target's most probable one behind the last node.
    """
    assert answer.nodes is not None, "it has branches"
    rows = torch.tensor(branch.nodes)
    signal, tokens = answer.nodes.signal.at(rows), answer.nodes.tokens[rows].tolist()
    missing = (0, answer.signal.ids.shape[1] - signal.ids.shape[1])
    wide = TeacherSignal(
        "topk", pad(signal.ids, missing, value=-1), pad(signal.logprobs, missing, value=-torch.inf), signal.tail
    )
    return Sample(
        prompt_id=f"{answer.request_id}/{answer.index}/{branch.text_tokens}",
        domain=answer.domain,
        prompt_ids=(*answer.prompt_ids, *answer.response_ids[: branch.text_tokens], tokens[0]),
        response_ids=(*tokens[1:], int(signal.ids[-1, 0])),
        signal=wide,
        source="teacher",
        finished=False,
    )
