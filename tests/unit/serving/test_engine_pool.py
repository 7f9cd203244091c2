"""Several drafts in one engine: text is the target's, whichever draft a row has, gets, loses or breaks."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from distillspec.config import DraftConfig, GateConfig
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, initialise_draft, save_draft
from distillspec.serving import Engine, EngineSettings, Request, SamplingParams
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.base.plans import StepResult
from distillspec.serving.base.requests import RequestOutput
from distillspec.serving.base.rows import RowView
from distillspec.serving.draft_loading import draft_names
from distillspec.serving.execution.runner import ModelRunner
from distillspec.serving.online.gate.monitor import ServedAcceptance
from distillspec.serving.proposers.draft_model import DraftModel
from distillspec.serving.proposers.side_by_side import SideBySide
from distillspec.serving.selection.base import Choices, drafts_of
from distillspec.serving.selection.losses import Losses
from distillspec.serving.selection.selecting import SelectingController, selecting

from ..models.state_drafts import state_draft
from .conftest import TIGHT, MakeEngine, plain_answers, prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


class Restless:
    """Draws another draft, or none, for each row in each step."""

    def __init__(self) -> None:
        self.on_trial, self.losses = set[str](), Losses()
        self.coming: dict[str, str] = {}
        self.beliefs: dict[str, float] = {}
        self.collapsed: list[str] = []
        self.turn = 0

    def choose(self, rows: Sequence[RowView]) -> Choices:
        draws = Random(self.turn)
        return {row.sequence_id: draws.choice([None, *(own.source for own in drafts_of(row))]) for row in rows}

    def observe(self, result: StepResult, chosen: Choices) -> None:
        self.turn += 1

    def draft_changed(self, change: DraftChange) -> None: ...


def restless(length: int = 3) -> SelectingController:
    return SelectingController(FixedLength(length), lambda latency: Restless())


@pytest.fixture
def drafts(target: LanguageModel, draft: LanguageModel, truncated_draft: LanguageModel) -> dict[str, LanguageModel]:
    """Drafts of unlike kinds: two read tokens, one the target's states."""
    eagle = state_draft("eagle", target, torch.arange(0, 250, 2), noise=0.02)
    return {"half": draft, "small": truncated_draft, "states": eagle}


def answers(engine: Engine, asked: Sequence[list[int]], params: SamplingParams = GREEDY) -> list[RequestOutput]:
    found = engine.generate(list(asked), params)
    engine.check_integrity()
    return found


@pytest.mark.parametrize("proposer", [None, "lookup_else_model", ["suffix", "draft_model"]])
@pytest.mark.parametrize("seed", [None, 5])
def test_text_is_the_targets_own_whichever_draft_each_row_has(
    target: LanguageModel, drafts: dict[str, LanguageModel], make_engine: MakeEngine, proposer: Any, seed: int | None
) -> None:
    asked = prompts(6)
    params = GREEDY if seed is None else SamplingParams(temperature=0.8, seed=seed, max_tokens=30, ignore_eos=True)
    engine = make_engine(drafts, controller_object=restless(), proposer=proposer, **TIGHT)
    found = answers(engine, asked, params)
    assert [output.token_ids for output in found] == plain_answers(target, asked, [params] * 6)
    used = {source for output in found for source in output.stats.sources}
    assert {"half", "small", "states"} <= used
    assert ("lookup" in used or "suffix" in used) == (proposer is not None)
    versions = {version for output in found for version in output.stats.draft_versions}
    assert versions == {*engine.draft_versions.values()} == {draft.identity.version for draft in drafts.values()}


@pytest.mark.parametrize("selection", ["goodput", "lbss", "random", "epsilon_greedy", "prompt_length", "fixed"])
def test_each_selection_serves_with_the_default_controller(
    target: LanguageModel,
    drafts: dict[str, LanguageModel],
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    selection: str,
) -> None:
    # Each pass is timed once. No pause of this machine leaves one out.
    monkeypatch.setattr("distillspec.serving.start_costs.MOST_RUNS", 1)
    asked = prompts(6)
    engine = make_engine(drafts, **{**TIGHT, "controller": "goodput", "selection": selection, "measure_costs_s": 600})
    assert engine.costs is not None
    assert list(engine.costs.members) == list(drafts)
    assert [list(output.token_ids) for output in answers(engine, asked)] == [hf_greedy_30(target, p) for p in asked]
    chooses = selecting(engine.controller)
    assert chooses is not None
    assert sum(chooses.figures.requests.values()) == 6


def test_rows_of_several_drafts_are_verified_in_one_pass_of_the_target(
    drafts: dict[str, LanguageModel], make_engine: MakeEngine
) -> None:
    engine = make_engine(drafts, controller_object=restless(), max_slots=6)
    for number, prompt in enumerate(prompts(6)):
        engine.submit(Request(str(number), tuple(prompt[:6]), GREEDY))
    engine.step()  # reads the prompts
    together = 0
    for _ in range(12):
        before = engine.runner.passes
        result = engine.step().result
        assert engine.runner.passes == before + 1
        assert result is not None
        together += len({source for row in result.rows for trial in row.trials for source in [trial.source]}) > 1
    assert together > 6, "steps in which rows of unlike drafts speculated"


def hf_greedy_30(target: LanguageModel, prompt: list[int]) -> list[int]:
    return list(plain_answers(target, [prompt], [GREEDY])[0])


def test_drafts_come_and_go_under_traffic(
    target: LanguageModel, drafts: dict[str, LanguageModel], make_engine: MakeEngine, tmp_path: Path
) -> None:
    """Two hundred loads and unloads at random steps: the text stays, and no model or memory is left behind."""
    asked, folders = prompts(8), dict[str, Path]()
    wanted = [hf_greedy_30(target, prompt) for prompt in asked]
    for name, draft in drafts.items():
        save_draft(draft, folders.setdefault(name, tmp_path / name), target)
    engine = make_engine(dict(drafts), controller_object=restless(), **TIGHT)
    draws, changes, number, done = Random(1), 0, 0, dict[str, list[int]]()
    released: list[weakref.ref[Any]] = []  # models, and runners with their caches
    while changes < 200 or engine.has_work:
        if changes < 200 and len(engine.sequences.unfinished) < 4:
            engine.submit(Request(str(number), tuple(asked[number % 8]), GREEDY))
            number += 1
        name = draws.choice(list(folders))
        if changes < 200 and draws.random() < 0.7:
            if name in engine.drafts:
                released += [weakref.ref(engine.drafts[name].model), weakref.ref(runner_of(engine, name))]
            if name in engine.drafts and draws.random() < 0.5:
                engine.unload_draft(name)
            else:
                engine.load_draft(folders[name], name=name)
            changes += 1
        for output in engine.step().finished:
            done[output.request_id] = list(output.token_ids)
        engine.check_integrity()
    assert done == {str(n): wanted[n % 8] for n in range(number)}
    gc.collect()
    alive = [own for own in (made() for made in released) if own is not None]
    kept = {id(draft.model) for draft in (*drafts.values(), *engine.drafts.values())}
    kept |= {id(runner_of(engine, name)) for name in engine.drafts}
    assert all(id(own) in kept for own in alive)
    assert len(released) > 200


def runner_of(engine: Engine, name: str) -> ModelRunner:
    assert isinstance(engine.proposer, SideBySide)
    member = engine.proposer.proposers[name]
    assert isinstance(member, DraftModel)
    return member.runner


def test_a_draft_that_raises_rests_and_the_others_go_on(
    target: LanguageModel,
    drafts: dict[str, LanguageModel],
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine(drafts, controller_object=restless(), max_slots=3)
    pool, calls = engine.proposer, list[int]()
    assert isinstance(pool, SideBySide)

    def failing(requests: Sequence[Any]) -> Any:
        calls.append(len(requests))
        raise RuntimeError("out of memory")

    monkeypatch.setattr(pool.proposers["small"], "propose", failing)
    served = {source: ServedAcceptance(GateConfig(), source=source) for source in drafts}
    engine.observer = lambda emissions, logits: [own.watch(emissions) for own in served.values()]
    with caplog.at_level(logging.WARNING):
        found = answers(engine, prompts(4))
    assert [list(output.token_ids) for output in found] == [hf_greedy_30(target, prompt) for prompt in prompts(4)]
    sources = {source for output in found for source in output.stats.sources}
    assert sources == {"half", "states"}
    assert 1 < len(calls) < 10
    told = [record.getMessage() for record in caplog.records if "out of memory" in record.getMessage()]
    assert len(told) == 1
    assert "small failed" in told[0]
    for source, own in served.items():
        own.finish(found)
        (counts,) = own.figures()["versions"].values()
        assert (counts["tried"] == 4) == (source == "small"), "one rejection of each answer, of the one that failed"


def test_nan_of_one_draft_ends_that_draft_for_the_row(
    target: LanguageModel, drafts: dict[str, LanguageModel], make_engine: MakeEngine
) -> None:
    engine = make_engine(drafts, controller_object=restless(), max_slots=3, prefix_reuse=False)
    pool = engine.proposer
    assert isinstance(pool, SideBySide)
    broken = pool.proposers["half"]
    assert isinstance(broken, DraftModel)
    for number, prompt in enumerate(prompts(3)):
        engine.submit(Request(str(number), tuple(prompt), GREEDY))
    done: dict[str, RequestOutput] = {}
    for step in range(400):
        if not engine.has_work:
            break
        if step == 8:
            with torch.inference_mode():
                for keys, _ in broken.runner.cache.layers.values():
                    keys[0] = torch.nan
        done.update({output.request_id: output for output in engine.step().finished})
    assert [list(done[str(n)].token_ids) for n in range(3)] == [hf_greedy_30(target, prompt) for prompt in prompts(3)]
    assert any("small" in output.stats.sources for output in done.values())


def test_without_its_last_draft_the_engine_decodes_plainly_and_says_so(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine({"only": draft}, controller="goodput")
    engine.submit(Request("a", tuple(prompts()[1]), GREEDY))
    for _ in range(4):
        engine.step()
    engine.unload_draft("only")
    with caplog.at_level(logging.ERROR):
        found = engine.run_until_done(["a"])["a"]
    assert list(found.token_ids) == hf_greedy_30(target, prompts()[1])
    assert engine.drafts == {}
    assert engine.draft is None
    assert any("the last draft is unloaded" in record.getMessage() for record in caplog.records)


def test_from_pretrained_takes_folders_and_names_them(
    target: LanguageModel, drafts: dict[str, LanguageModel], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("half", "small"):
        save_draft(drafts[name], tmp_path / name / "draft", target)
    save_draft(drafts["half"], tmp_path / "other" / "half", target)
    paths = [tmp_path / "half" / "draft", tmp_path / "small" / "draft", tmp_path / "other" / "half"]
    engine = Engine.from_pretrained("tiny", draft=paths, dtype="float32", max_slots=2, max_model_len=128)
    assert list(engine.drafts) == ["half-1", "small", "half-2"]
    engine.close()
    spoil(tmp_path / "small" / "draft")
    with caplog.at_level(logging.ERROR):
        engine = Engine.from_pretrained("tiny", draft=paths, dtype="float32", max_slots=2, max_model_len=128)
    assert list(engine.drafts) == ["half-1", "half-2"]
    engine.close()
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert told.startswith("the draft small is refused, and the others serve: the draft")
    with pytest.raises(ConfigError, match="no draft can be used: small: the draft"):
        Engine.from_pretrained("tiny", draft=paths[1:2], dtype="float32")
    with pytest.raises(ConfigError, match=r"draft=\[\] names none"):
        Engine.from_pretrained("tiny", draft=[])


def spoil(folder: Path) -> None:
    """Put NaN into a draft's weights on disk."""
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        metadata = opened.metadata()
    first = next(iter(tensors))
    tensors[first] = torch.full_like(tensors[first], torch.nan)
    save_file(tensors, file, metadata)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"proposer": "staged"}, "proposer=staged runs one draft, and 3 are given"),
        ({"proposer": "suffix"}, "proposer=suffix runs no draft, and 3 are given"),
        ({"selection": "random", "selection_options": {"x": 1}}, "random has no option 'x'"),
    ],
)
def test_what_several_drafts_cannot_have_is_refused(
    drafts: dict[str, LanguageModel], make_engine: MakeEngine, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        make_engine(drafts, **settings)


def test_names_are_checked(
    draft: LanguageModel, target: LanguageModel, make_engine: MakeEngine, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="a draft cannot be called lookup"):
        make_engine({"lookup": draft})
    with pytest.raises(ConfigError, match="a draft cannot be called draft"):
        make_engine({"draft": draft, "a": draft})
    with pytest.raises(ConfigError, match="selection=best is not known"):
        EngineSettings(selection="best")
    pool = make_engine({"a": draft})
    with pytest.raises(ConfigError, match=r"there is no draft 'b' to unload; this engine has a$"):
        pool.unload_draft("b")
    save_draft(draft, tmp_path / "b", target)
    one = make_engine(draft)
    with pytest.raises(ConfigError, match="this engine has one draft"):
        one.load_draft(tmp_path / "b", name="b")
    with pytest.raises(ConfigError, match="no pool of drafts"):
        one.unload_draft("a")


def test_names_of_folders_alike_are_numbered_past_those_that_there_are() -> None:
    paths = ["x/a", "y/a", "z/a-1", "z/b", "w/a"]
    assert draft_names(paths) == ["a-2", "a-3", "a-1", "b", "a-4"]


def test_a_draft_called_as_the_only_one_is_does_not_join_a_pool(
    draft: LanguageModel, target: LanguageModel, make_engine: MakeEngine, tmp_path: Path
) -> None:
    save_draft(draft, tmp_path / "b", target)
    engine = make_engine({"a": draft})
    with pytest.raises(ConfigError, match="a draft cannot be called draft"):
        engine.load_draft(tmp_path / "b", name="draft")
    assert list(engine.drafts) == ["a"]


def test_drafts_of_a_pool_whose_proposer_was_replaced_stay_as_they_are(
    draft: LanguageModel, target: LanguageModel, make_engine: MakeEngine, tmp_path: Path
) -> None:
    save_draft(draft, tmp_path / "b", target)
    engine = make_engine({"a": draft})
    engine.use_proposer(None)
    engine.load_draft(tmp_path / "b")
    engine.step()
    assert list(engine.drafts) == ["a"]
    with pytest.raises(ConfigError, match="the proposer was replaced"):
        engine.load_draft(tmp_path / "b")
    with pytest.raises(ConfigError, match="the proposer was replaced"):
        engine.use_draft(draft, name="a")
    with pytest.raises(ConfigError, match="the proposer was replaced"):
        engine.unload_draft("a")
    assert [list(output.token_ids) for output in answers(engine, prompts(2))] == [
        hf_greedy_30(target, prompt) for prompt in prompts(2)
    ]


def test_states_are_kept_as_long_as_a_draft_reads_them(
    target: LanguageModel, drafts: dict[str, LanguageModel], make_engine: MakeEngine, tmp_path: Path
) -> None:
    save_draft(drafts["states"], tmp_path / "states", target)
    engine = make_engine(drafts, controller_object=restless(), **TIGHT)
    assert answers(engine, prompts(2))
    assert engine.runner.cache.features is not None
    engine.unload_draft("states")
    engine.step()
    assert engine.runner.cache.state_ids == ()
    assert engine.runner.cache.features is None
    wanted = [hf_greedy_30(target, prompt) for prompt in prompts(4)]
    assert [list(output.token_ids) for output in answers(engine, prompts(4))] == wanted
    engine.load_draft(tmp_path / "states")
    found = answers(engine, prompts(4))
    assert [list(output.token_ids) for output in found] == wanted
    assert any("states" in output.stats.sources for output in found)


def test_a_draft_of_another_target_is_refused_and_the_others_serve(
    draft: LanguageModel, make_engine: MakeEngine, tmp_path: Path, random_model: Callable[..., LanguageModel]
) -> None:
    other = random_model("llama", torch.float32)
    save_draft(initialise_draft(DraftConfig(layers=1), other), tmp_path / "foreign", other)
    engine = make_engine({"a": draft}, controller="goodput")
    with pytest.raises(ConfigError):
        engine.load_draft(tmp_path / "foreign")
    assert list(engine.drafts) == ["a"]
    assert len(answers(engine, prompts(2))) == 2
