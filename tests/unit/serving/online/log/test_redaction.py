"""Text that an operator's hook removes is nowhere in the log, and other answers stay as they are."""

from __future__ import annotations

import math
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from distillspec.config import AdaptConfig, LossConfig
from distillspec.models import LanguageModel
from distillspec.serving import Request
from distillspec.serving.online.log.records import PLAIN, LoggedAnswer, LogKey
from distillspec.serving.online.log.redaction import Redaction, mask, redacted
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.log.shard import ROW_FIELDS
from distillspec.serving.online.log.tap import ReplayTap
from distillspec.serving.online.log.writer import LogWriter
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.training.examples import training_example_of
from distillspec.serving.online.training.learning import learn
from distillspec.signals import TeacherSignal

from ...conftest import MakeEngine
from ..conftest import Answer
from .test_tap import requests, serve

MASK = 1
Change = Callable[[random.Random, tuple[int, ...]], tuple[int, ...]]


def masked(dice: random.Random, ids: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(MASK if dice.random() < 0.3 else i for i in ids)


def shortened(dice: random.Random, ids: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(i for i in ids if dice.random() < 0.8)


def lengthened(dice: random.Random, ids: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(part for i in ids for part in ([MASK] * 3 if dice.random() < 0.1 else [i]))


def cut(dice: random.Random, ids: tuple[int, ...]) -> tuple[int, ...]:
    return ids[: dice.randrange(len(ids) + 1)]


def untouched(dice: random.Random, ids: tuple[int, ...]) -> tuple[int, ...]:
    return ids


CHANGES: tuple[Change, ...] = (masked, shortened, lengthened, cut, untouched)


def drafted(answer: LoggedAnswer, dice: random.Random) -> LoggedAnswer:
    """The answer with drafted tokens as they come about."""
    generator = torch.Generator().manual_seed(dice.randrange(1 << 30))
    others = torch.randint(3, 250, (len(answer),), generator=generator, dtype=torch.int32)
    emitted = torch.tensor(answer.response_ids, dtype=torch.int32)
    return replace(answer, draft_tokens=torch.where(answer.outcomes == 0, emitted, others))


def numbers_of(answer: LoggedAnswer) -> list[torch.Tensor]:
    """Every tensor that names tokens, `[R, …]`."""
    return [answer.signal.ids, answer.draft_tokens[:, None]]


def bits(answer: LoggedAnswer) -> list[bytes]:
    signal = answer.signal
    rows = (*numbers_of(answer), signal.logprobs, signal.tail, *(getattr(answer, name) for name in ROW_FIELDS))
    return [column.contiguous().view(torch.uint8).numpy().tobytes() for column in rows]


def logged(settings: OnlineSettings, key: LogKey, folder: Path, answers: list[LoggedAnswer], hook: Redaction) -> list:
    """Write answers through a writer into one shard and read them again."""
    replay = ReplayLog(folder, key, replace(settings.replay, shard_positions=1 << 20), clock=lambda: 2000.0)
    writer = LogWriter(replay, hook)
    writer.start()
    assert all(writer.put(answer) for answer in answers)
    writer.stop()
    assert len(list(folder.glob("shard-*"))) <= 1
    return replay.load(replay.entries())


@pytest.mark.parametrize("seed", range(8))
def test_no_removed_id_stays_and_every_other_answer_is_as_if_alone(
    settings: OnlineSettings, key: LogKey, answer: Answer, tmp_path: Path, seed: int
) -> None:
    """Whatever the hook returns."""
    dice = random.Random(seed)
    answers = [drafted(answer(f"r{i}", tokens=dice.randrange(1, 40), finished=True), dice) for i in range(12)]
    touched = {f"r{i}": (dice.choice(CHANGES), dice.choice(CHANGES)) for i in range(0, 12, 2)}
    returned: dict[str, LoggedAnswer | None] = {}

    def hook(given: LoggedAnswer) -> LoggedAnswer | None:
        if given.request_id not in touched:
            return given
        of_prompt, of_response = touched[given.request_id]
        text = of_prompt(dice, given.prompt_ids), of_response(dice, given.response_ids)
        found = None if dice.random() < 0.1 else replace(given, prompt_ids=text[0], response_ids=text[1])
        returned[given.request_id] = found
        return found

    found = {each.request_id: each for each in logged(settings, key, tmp_path / "all", answers, hook)}
    for original in answers:
        name = original.request_id
        if name not in touched:
            (alone,) = logged(settings, key, tmp_path / name, [original], lambda each: each)
            assert bits(found[name]) == bits(alone)
            assert found[name].response_ids == original.response_ids
            continue
        kept, expected = found.get(name), returned[name]
        if kept is None:
            continue
        assert expected is not None
        assert kept.prompt_ids == expected.prompt_ids
        assert kept.response_ids == expected.response_ids[: len(kept)]
        assert len(kept.signal) == len(kept) == len(kept.outcomes)
        gone = {*original.prompt_ids, *original.response_ids} - {*kept.prompt_ids, *kept.response_ids}
        for column in numbers_of(kept):
            assert gone.isdisjoint(column.flatten().tolist())
            for row, before, after in zip(column.tolist(), original.response_ids, kept.response_ids, strict=False):
                assert before == after or before not in row
        changed = [old != new for old, new in zip(original.response_ids, kept.response_ids, strict=False)]
        assert torch.equal(kept.policy_logprobs.isnan(), torch.tensor(changed)), "what was replaced judges nobody"
        total = kept.signal.logprobs.float().exp().sum(-1) + kept.signal.tail
        torch.testing.assert_close(total, torch.ones(len(kept)), atol=0.01, rtol=0)
        assert not kept.finished or len(kept) == len(original)
    # Nothing but what was read: the file has no further rows.
    (shard,) = (tmp_path / "all").glob("shard-*")
    rows = sum(map(len, found.values()))
    assert {len(load_file(shard)[name]) for name in ("signal_ids", "policy_logprobs", "draft_tokens")} == {rows}


def test_a_masked_row_teaches_on_with_what_is_left_of_it(
    settings: OnlineSettings, key: LogKey, answer: Answer, small_draft: LanguageModel, tmp_path: Path
) -> None:
    original = answer("a", tokens=20)
    if original.response_ids[0] not in original.signal.ids[0]:
        original.signal.ids[0, 3] = original.response_ids[0]  # as of text that the target wrote

    def mask(given: LoggedAnswer) -> LoggedAnswer:
        return replace(given, response_ids=(MASK, *given.response_ids[1:]))

    (kept,) = logged(settings, key, tmp_path, [original], mask)
    (masked_entry,) = (kept.signal.ids[0] == -1).nonzero().flatten().tolist()
    assert original.signal.ids[0, masked_entry] == original.response_ids[0]
    lost = original.signal.logprobs[0, masked_entry].float().exp()
    assert float(kept.signal.tail[0]) == pytest.approx(float(original.signal.tail[0] + lost), abs=2e-3)
    learnt, _ = learn(
        small_draft, [training_example_of(kept, AdaptConfig(max_steps=2))], AdaptConfig(max_steps=2), LossConfig()
    )
    assert (learnt.problem, learnt.bad_steps) == ("", 0)
    assert math.isfinite(learnt.loss)


def test_what_was_drafted_in_a_removed_tokens_place_goes_too(answer: Answer) -> None:
    dice = random.Random(0)
    original = drafted(answer("a", tokens=10), dice)
    assert int(original.outcomes[0]) == 0  # accepted: the drafted token is the emitted one
    kept = redacted(original, lambda a: replace(a, response_ids=(MASK, *a.response_ids[1:])), 256)
    assert kept is not None
    assert (int(kept.draft_tokens[0]), int(kept.outcomes[0])) == (-1, PLAIN)
    assert bool(kept.draft_probs[0].isnan())


def broken(given: LoggedAnswer) -> LoggedAnswer:
    raise RuntimeError(f"the secret text {given.response_ids}")


def leaving(given: LoggedAnswer) -> LoggedAnswer:
    sys.exit(1)


def of_another_kind(given: LoggedAnswer) -> LoggedAnswer:
    return "redacted"  # type: ignore[return-value]


def beyond_the_vocabulary(given: LoggedAnswer) -> LoggedAnswer:
    return replace(given, response_ids=tuple(-1 for _ in given.response_ids))


def of_another_shape(given: LoggedAnswer) -> LoggedAnswer:
    signal = given.signal
    return replace(given, signal=TeacherSignal("topk", signal.ids[:, :2], signal.logprobs[:, :2], signal.tail))


@pytest.mark.parametrize("fails", [broken, leaving, of_another_kind, beyond_the_vocabulary, of_another_shape])
def test_an_answer_that_the_hook_fails_on_is_dropped_alone(
    settings: OnlineSettings,
    key: LogKey,
    answer: Answer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fails: Redaction,
) -> None:
    replay = ReplayLog(tmp_path, key, settings.replay, clock=lambda: 2000.0)
    writer = LogWriter(replay, lambda given: fails(given) if given.request_id == "b" else given)
    writer.start()
    for name in "abc":
        writer.put(answer(name))
    writer.stop()
    assert [entry.request_id for entry in replay.entries()] == ["a", "c"]
    assert +writer.counters == {"written": 2, "errors": 1}
    assert "replay.redaction failed" in caplog.text
    assert "secret" not in caplog.text


def test_a_hook_that_hangs_holds_up_neither_the_engine_nor_the_end(
    settings: OnlineSettings, key: LogKey, draft: LanguageModel, make_engine: MakeEngine, tmp_path: Path
) -> None:
    entered, release = threading.Event(), threading.Event()

    def hang(given: LoggedAnswer) -> LoggedAnswer:
        entered.set()
        release.wait(60)
        return given

    config = replace(settings.replay, max_waiting=50, flush_s=0.01)
    replay = ReplayLog(tmp_path, key, config, clock=lambda: 2000.0)
    writer = LogWriter(replay, hang)
    writer.start()
    tap = ReplayTap(config, writer.put, lambda: 1000.0)
    engine = make_engine(draft)
    serve(engine, tap, requests()[:1])
    assert entered.wait(60)
    serve(engine, tap, [Request(f"more{i}", r.prompt_ids, r.params) for i, r in enumerate(requests())])
    assert tap.counters["dropped_queue"] > 0  # the engine went on, and what did not fit was dropped
    tap.forget_tenant("default")  # nor does a deletion wait for the hook
    writer.forget_tenant("default")
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "replay-writer")
    writer.stop(patience_s=0.0)
    release.set()
    thread.join(60)
    assert not thread.is_alive()
    assert replay.entries() == []


def test_a_tenant_deleted_while_its_answer_is_redacted_is_not_written_under_another_name(
    settings: OnlineSettings, key: LogKey, answer: Answer, tmp_path: Path
) -> None:
    replay = ReplayLog(tmp_path, key, settings.replay, clock=lambda: 2000.0)

    def rename(given: LoggedAnswer) -> LoggedAnswer:
        if given.tenant == "gone":
            writer.forget_tenant("gone")
        return replace(given, tenant="nobody")

    writer = LogWriter(replay, rename)
    writer.start()
    writer.put(answer("a", tenant="gone"))
    writer.put(answer("b", tenant="stays"))
    writer.stop()
    assert [entry.request_id for entry in replay.entries()] == ["b"]
    assert replay.tenants() == {"nobody": 1}
    assert writer.counters["dropped_deleted"] == 1


def test_a_hook_masks_positions(settings: OnlineSettings, key: LogKey, answer: Answer, tmp_path: Path) -> None:
    original = answer("a", tokens=20)
    (kept,) = logged(settings, key, tmp_path, [original], lambda given: mask(given, [3, 4], MASK, prompt=[0]))
    assert kept.prompt_ids == (MASK, *original.prompt_ids[1:])
    assert kept.response_ids == (*original.response_ids[:3], MASK, MASK, *original.response_ids[5:])
    assert kept.policy_logprobs.isnan().nonzero().flatten().tolist() == [3, 4]
