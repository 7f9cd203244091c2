"""Recorded passes give what plain passes give. The recorder is a fake that replays by running again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from distillspec.config import DraftConfig
from distillspec.models import LanguageModel, initialise_draft
from distillspec.serving import Engine, EngineSettings, Request, SamplingParams
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.base.ladder import Ladder
from distillspec.serving.base.plans import Plan, RowPlan
from distillspec.serving.base.rows import BatchView
from distillspec.serving.base.tree import TokenTree

from ..base.test_transfer import Guesses
from ..conftest import hf_greedy, prompts

Output = TypeVar("Output")


class FakeRecorder:
    """Counts recordings. A replay runs the computation on the present buffers.

    As with CUDA graphs of one memory pool, a replay overwrites the output of earlier ones. Here that is poisoned, so
    that code which reads it too late fails.
    """

    has_room = True

    def __init__(self, most: int = 256) -> None:
        self.most = most
        self.recorded = 0
        self.replayed = 0
        self._outputs: list[Tensor] = []

    def record(self, run: Callable[[], Output]) -> Callable[[], Output]:
        self.recorded += 1
        output = run()
        self._outputs += _tensors(output)

        def replay() -> Output:
            self.replayed += 1
            for held in self._outputs:
                held.fill_(torch.nan if held.is_floating_point() else -1)
            for held, new in zip(_tensors(output), _tensors(run()), strict=True):
                held.copy_(new)
            return output

        return replay


def _tensors(output: object) -> list[Tensor]:
    """A pass gives one tensor, a draft's loop several."""
    parts = output if isinstance(output, tuple) else (output,)
    return [part for part in parts if isinstance(part, Tensor)]


@pytest.mark.parametrize(
    ("kind", "page"), [("llama", 0), ("mistral", 0), ("gemma3_text", 0), ("llama", 16), ("mistral", 4)]
)
def test_replayed_passes_write_the_same_text(
    random_model: Callable[[str], LanguageModel], kind: str, page: int
) -> None:
    """With pages, replays follow a block table that the host has changed since the recording."""
    model = random_model(kind)
    asked = prompts(6)
    wanted = [hf_greedy(model, prompt, 20) for prompt in asked]
    recorder = FakeRecorder()
    draft = initialise_draft(DraftConfig(layers=2), model)
    settings = EngineSettings(
        max_slots=3, max_model_len=256, controller="fixed", speculation_length=3, page_tokens=page
    )
    engine = Engine(model, draft, settings, recorder=recorder)
    outputs = engine.generate(asked, SamplingParams(temperature=0.0, max_tokens=20))
    assert [list(output.token_ids) for output in outputs] == wanted
    assert recorder.replayed > 10
    # The target's tokens in small steps, rows, widths and lengths in few: few shapes.
    assert recorder.recorded <= 2 * 3 * 3 * 4
    assert engine.runner.graphs is not None
    assert engine.runner.graphs.shapes > 0
    loop = engine.proposer.loop  # type: ignore[union-attr]
    assert loop.shapes > 0  # a draft's whole loop is one recording
    engine.close()
    assert engine.runner.graphs is None, "recordings hold memory"
    assert not engine.runner.cache.layers
    assert loop.shapes == 0


def test_decoding_passes_are_recorded_before_traffic(target: LanguageModel) -> None:
    recorder = FakeRecorder()
    settings = EngineSettings(max_slots=3, max_model_len=256, controller="fixed", speculation_length=0)
    engine = Engine(target, None, settings, recorder=recorder)
    assert recorder.recorded == 3, "one, two and three rows"
    asked = [[20 * (i + 1) + token % 20 for token in range(30 + i)] for i in range(5)]
    engine.generate(asked, SamplingParams(temperature=0.0, max_tokens=20))
    assert recorder.recorded == 3
    assert recorder.replayed > 20
    engine.close()


class Widths:
    """Notes the numbers of tokens that the linear layers of a model compute."""

    def __init__(self, model: LanguageModel) -> None:
        self.seen: set[int] = set()
        linear = next(part for part in model.layers[0].modules() if isinstance(part, torch.nn.Linear))
        self._hook = linear.register_forward_pre_hook(lambda _, given: self.seen.add(given[0].shape[-2]))

    def remove(self) -> None:
        self._hook.remove()


class Ragged(FixedLength):
    """Lengths of up to 4 that differ from row to row, and whose sum differs from step to step."""

    def plan(self, view: BatchView) -> Plan:
        self.step = getattr(self, "step", 0) + 1
        lengths = [(place + self.step) % (1 + self.step % 5) for place in range(len(view.rows))]
        return Plan(tuple(RowPlan.chain(row, length) for row, length in zip(view.rows, lengths, strict=True)))


def test_ragged_windows_compute_the_next_number_on_the_ladder_and_all_are_recorded_before_traffic(
    target: LanguageModel,
) -> None:
    """Six rows of at most five tokens: 30 tokens run as 32, and 17 as 20."""
    recorder = FakeRecorder()
    settings = EngineSettings(max_slots=6, max_model_len=256, compile=False, pack_weights=False, prefix_reuse=False)
    proposer = Guesses(TokenTree.chain([65, 66, 67, 68]))
    asked = [[20 + 7 * row, *range(40, 60)] for row in range(6)]
    wanted = [hf_greedy(target, prompt, 24) for prompt in asked]
    widths, ladder = Widths(target), set(Ladder.tokens(30).steps)
    engine = Engine(target, None, settings, recorder=recorder, controller=Ragged(4), proposer=proposer)
    assert widths.seen >= ladder
    before = recorder.recorded
    for row, prompt in enumerate(asked):
        engine.submit(Request(str(row), tuple(prompt), SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)))
    engine.step()
    widths.seen.clear()
    for _ in range(12):
        engine.step()
    widths.remove()
    assert recorder.recorded == before
    assert recorder.replayed == 12
    assert widths.seen <= ladder
    assert len(widths.seen) > 3
    written = [engine.sequences.unfinished[f"{row}/0"].output_ids for row in range(6)]
    engine.close()
    for found, text in zip(written, wanted, strict=True):
        assert len(found) > 12
        assert found[: len(text)] == text[: len(found)]


@pytest.mark.parametrize(("most", "room", "count"), [(8, 256, 4), (256, 5, 5)], ids=["shapes", "memory"])
def test_recordings_before_traffic_are_bounded(target: LanguageModel, most: int, room: int, count: int) -> None:
    """By half of all recordings, and by the device's memory. What is not recorded runs as it is."""

    class Full(FakeRecorder):
        @property
        def has_room(self) -> bool:  # type: ignore[override]
            return self.recorded < room

    asked = prompts(4)
    wanted = [hf_greedy(target, prompt, 12) for prompt in asked]
    recorder = Full(most)
    settings = EngineSettings(max_slots=3, max_model_len=256, controller="fixed", speculation_length=3)
    engine = Engine(target, None, settings, recorder=recorder)
    assert recorder.recorded == count
    outputs = engine.generate(asked, SamplingParams(temperature=0.0, max_tokens=12))
    engine.close()
    assert recorder.recorded <= min(most, room)
    assert [list(output.token_ids) for output in outputs] == wanted


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_recorded_draft_loop_drafts_as_the_passes_one_by_one(
    random_model: Callable[[str], LanguageModel], temperature: float
) -> None:
    model = random_model("llama")
    params = SamplingParams(temperature=temperature, max_tokens=30, ignore_eos=True)
    settings = EngineSettings(max_slots=3, max_model_len=64, controller="fixed", speculation_length=4)
    found = []
    for recorder in (FakeRecorder(), None):
        engine = Engine(model, initialise_draft(DraftConfig(layers=2), model), settings, recorder=recorder)
        # The same draws in the same order, also where rows want different lengths.
        engine.proposer.can_draft_in_loop = lambda rows: True  # type: ignore[union-attr]
        outputs = engine.generate([p[:20] for p in prompts(6)], params)
        engine.close()
        found.append([(output.token_ids, output.stats.proposed, output.stats.accepted) for output in outputs])
    assert found[0] == found[1]
    assert sum(accepted for _, _, accepted in found[0]) > 0


class PassesAlone(FakeRecorder):
    """Records single passes, and no whole loops: their shapes are many, and there is no room for all."""

    def record(self, run: Callable[[], Output]) -> Callable[[], Output]:
        if isinstance(run(), tuple):
            raise RuntimeError("no room")
        return super().record(run)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_loop_that_is_not_recorded_runs_by_recorded_passes_to_the_end_of_the_context(
    random_model: Callable[[str], LanguageModel], kind: str
) -> None:
    """Each pass goes on behind tokens that the device alone knows, and one row's chain reaches beyond its context."""
    model, recorder = random_model(kind), PassesAlone()
    length = 256 if kind == "gpt2" else 64
    settings = EngineSettings(max_slots=3, max_model_len=length, controller="fixed", speculation_length=4)
    engine = Engine(model, initialise_draft(DraftConfig(layers=2), model), settings, recorder=recorder)
    asked = [[3 + token % 200 for token in range(count)] for count in (length - 12, 20, 9)]
    outputs = engine.generate(asked, SamplingParams(temperature=0.0, max_tokens=11, ignore_eos=True))
    graphs = engine.proposer.runner.graphs  # type: ignore[union-attr]
    assert graphs.shapes > 0
    engine.close()
    assert [list(output.token_ids) for output in outputs] == [hf_greedy(model, prompt, 11) for prompt in asked]


def test_a_recorder_that_fails_is_not_asked_again_and_the_text_is_right(
    target: LanguageModel, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(FakeRecorder):
        def record(self, run: Callable[[], Output]) -> Callable[[], Output]:
            self.recorded += 1
            raise RuntimeError("no compiler after all")

    recorder = Broken()
    asked = prompts(3)
    wanted = [hf_greedy(target, prompt, 8) for prompt in asked]
    engine = Engine(target, None, EngineSettings(max_slots=2, max_model_len=256), recorder=recorder)
    outputs = engine.generate(asked, SamplingParams(temperature=0.0, max_tokens=8))
    engine.close()
    assert [list(output.token_ids) for output in outputs] == wanted
    assert recorder.recorded == 1
    assert "no compiler after all" in caplog.text
