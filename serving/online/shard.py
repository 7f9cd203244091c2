"""A shard: many answers in one safetensors file, flat arrays with offsets, the words about them as JSON."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from distillspec.serving.online.records import LoggedAnswer, LogKey
from distillspec.types import SamplingPolicy, TeacherSignal

ROW_FIELDS = ("outcomes", "draft_tokens", "draft_probs", "draft_entropies", "version_of")


class ShardRefused(Exception):
    """The file is no shard, or one of another target; the message says which."""


def save_shard(path: Path, answers: Sequence[LoggedAnswer], key: LogKey) -> None:
    """Write answers whose signals have `key.entries` entries, and all as many draws from their tails.

    Ids take two bytes where the vocabulary allows it; those of signals four where some were redacted (−1).
    """
    for answer in answers:
        assert {len(answer)} == {len(answer.signal), *(len(getattr(answer, name)) for name in ROW_FIELDS)}
    ids = torch.uint16 if key.vocab_size <= 1 << 16 else torch.int32
    signal_ids = torch.cat([a.signal.ids for a in answers])
    texts = [(*answer.prompt_ids, *answer.response_ids) for answer in answers]
    tensors = {
        "tokens": torch.tensor(list(itertools.chain(*texts)), dtype=torch.int32).to(ids),
        "token_offsets": _offsets(map(len, texts)),
        "row_offsets": _offsets(map(len, answers)),
        "signal_ids": signal_ids.to(torch.int32 if bool((signal_ids < 0).any()) else ids),
        "signal_logprobs": torch.cat([a.signal.logprobs for a in answers]).to(torch.float16),
        "signal_tail": torch.cat([a.signal.tail for a in answers]).to(torch.float16),
        **{name: torch.cat([getattr(a, name) for a in answers]) for name in ROW_FIELDS},
        **_draws(answers),
    }
    words = {"key": asdict(key), "answers": [_words(answer) for answer in answers]}
    save_file(tensors, path, metadata={"distillspec_replay": json.dumps(words)})


def load_shard(path: Path, key: LogKey) -> list[LoggedAnswer]:
    """All answers of a shard.

    Raises:
        ShardRefused: unreadable, or recorded with another target than `key`'s.
    """
    try:
        with safe_open(path, framework="pt") as stream:
            words = json.loads(stream.metadata()["distillspec_replay"])
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise ShardRefused(f"{path.name} is not readable: {error}") from error
    differing = [name for name, value in asdict(key).items() if words["key"].get(name) != value]
    if differing:
        raise ShardRefused(
            f"{path.name} was recorded with another {differing[0]}: {words['key'].get(differing[0])}, "
            f"not {getattr(key, differing[0])}"
        )
    return list(_answers(words["answers"], tensors))


def _answers(words: list[dict], tensors: dict[str, Tensor]) -> Iterable[LoggedAnswer]:
    tokens = tensors["tokens"].to(torch.int32).tolist()
    signal = TeacherSignal(
        "topk",
        tensors["signal_ids"].to(torch.int32),
        tensors["signal_logprobs"],
        tensors["signal_tail"].float(),
        tensors.get("tail_ids"),
        tensors.get("tail_logprobs"),
    )
    places = tensors["token_offsets"].tolist(), tensors["row_offsets"].tolist()
    for word, (first, last), (start, stop) in zip(words, *map(itertools.pairwise, places), strict=True):
        rows = slice(start, stop)
        answer_at = last - (stop - start)
        own: dict[str, Any] = {name: tensors[name][rows] for name in ROW_FIELDS}
        own |= word | {
            "policy": SamplingPolicy(**word["policy"]),
            "draft_versions": tuple(word["draft_versions"]),
        }
        yield LoggedAnswer(
            prompt_ids=tuple(tokens[first:answer_at]),
            response_ids=tuple(tokens[answer_at:last]),
            signal=signal.rows(start, stop),
            **own,
        )


def _draws(answers: Sequence[LoggedAnswer]) -> dict[str, Tensor]:
    """What was drawn from the tails, if anything was; −1 does not fit two bytes, so ids keep four."""
    found = [(a.signal.tail_ids, a.signal.tail_logprobs) for a in answers]
    drawn = [(ids, logprobs) for ids, logprobs in found if ids is not None and logprobs is not None]
    if len(drawn) != len(answers):
        return {}
    ids, logprobs = zip(*drawn, strict=True)
    return {"tail_ids": torch.cat(ids), "tail_logprobs": torch.cat(logprobs).to(torch.float16)}


def _words(answer: LoggedAnswer) -> dict:
    names = ("request_id", "index", "tenant", "domain", "time_s", "finished", "split", "draft_versions")
    return {**{name: getattr(answer, name) for name in names}, "policy": asdict(answer.policy)}


def _offsets(lengths: Iterable[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
