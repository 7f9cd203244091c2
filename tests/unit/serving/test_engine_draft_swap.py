"""Another draft while requests run: outputs stay, a bad file is refused and the old draft stays."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from distillspec.errors import ConfigError
from distillspec.files import write_folder
from distillspec.models import LanguageModel, save_draft
from distillspec.models.memory import kv_bytes_per_token
from distillspec.models.target import wrap
from distillspec.models.tiny import tiny_model
from distillspec.serving import Engine, Request, SamplingParams
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.engine_builder import ProposerBuilder
from distillspec.serving.held_models import HeldModels

from .conftest import MakeEngine, hf_greedy, prompts

PROMPT = prompts()[1]


@pytest.fixture
def folders(target: LanguageModel, draft: LanguageModel, truncated_draft: LanguageModel, tmp_path: Path) -> list[Path]:
    made = []
    for name, model in (("one", draft), ("two", truncated_draft)):
        save_draft(model, tmp_path / name, target)
        made.append(tmp_path / name)
    return made


def run_with_swaps(engine: Engine, params: SamplingParams, swaps: dict[int, Path]) -> tuple[list[int], list[str]]:
    """Step until the request is done, swapping before the given steps. Return its tokens and draft versions."""
    engine.submit(Request("a", tuple(PROMPT), params))
    step = 0
    while True:
        if step in swaps:
            engine.load_draft(swaps[step])
        output = engine.step()
        engine.check_integrity()
        step += 1
        if output.finished:
            return list(output.finished[0].token_ids), output.finished[0].stats.draft_versions


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_swaps_in_mid_request_change_no_token(
    target: LanguageModel, draft: LanguageModel, folders: list[Path], make_engine: MakeEngine, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=30, ignore_eos=True)
    (alone,) = make_engine(None).generate([PROMPT], params)
    engine = make_engine(draft, speculation_length=3)
    tokens, versions = run_with_swaps(engine, params, {2: folders[1], 5: folders[0]})
    assert tokens == list(alone.token_ids)
    assert len(versions) == 2  # the truncated one between two stretches of the same weights


def test_a_swap_before_the_first_step_and_while_idle(
    draft: LanguageModel, folders: list[Path], make_engine: MakeEngine
) -> None:
    engine = make_engine(draft)
    version = engine.load_draft(folders[1])
    (output,) = engine.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    assert output.stats.draft_versions == [version]


class Told(FixedLength):
    """A controller that keeps what it is told of drafts."""

    def __init__(self) -> None:
        super().__init__(2)
        self.changes: list[DraftChange] = []

    def draft_changed(self, change: DraftChange) -> None:
        self.changes.append(change)


def test_the_controller_is_told_how_much_larger_the_new_draft_is(
    target: LanguageModel, draft: LanguageModel, truncated_draft: LanguageModel, make_engine: MakeEngine
) -> None:
    told = Told()
    engine = make_engine(draft, controller_object=told)
    for new in (truncated_draft, draft):
        engine.use_draft(new)
        engine.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=2))
    smaller, larger = told.changes
    assert (smaller.source, smaller.like) == (larger.source, larger.like) == (DRAFT, DRAFT)
    assert smaller.times == pytest.approx(1 / larger.times)
    assert smaller.times < 1


def _nan_weights(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    name = next(iter(state))
    state[name] = torch.full_like(state[name], torch.nan)
    rewrite(folder, lambda: save_file(state, folder / "model.safetensors", metadata={"format": "pt"}))


def rewrite(folder: Path, change) -> None:  # type: ignore[no-untyped-def]
    """Change a draft folder and seal it again, as a faulty trainer would."""
    change()
    copy = folder.with_name(folder.name + "-copy")
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("sha256.json"))
    shutil.rmtree(folder)
    write_folder(folder, lambda temporary: shutil.copytree(copy, temporary, dirs_exist_ok=True))


def _truncated_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _other_tokenizer(folder: Path) -> None:
    file = folder / "tokenizer.json"
    words = json.loads(file.read_text())
    words["added_tokens"][0]["content"] = "<|another|>"
    rewrite(folder, lambda: file.write_text(json.dumps(words)))


def _other_shapes(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    name = next(name for name in state if name.endswith("mlp.up_proj.weight"))
    state[name] = state[name][:-1].clone()
    rewrite(folder, lambda: save_file(state, folder / "model.safetensors", metadata={"format": "pt"}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_nan_weights, r"NaN or infinite weights \(\w.*weight\)"),
        (_truncated_file, "damaged"),
        (_other_tokenizer, "tokenizer"),
        (_other_shapes, "cannot be|shape"),
        (shutil.rmtree, "cannot be|not a"),
    ],
)
def test_a_bad_draft_is_refused_and_the_old_one_stays(
    draft: LanguageModel,
    folders: list[Path],
    make_engine: MakeEngine,
    damage,
    message: str,  # type: ignore[no-untyped-def]
) -> None:
    engine = make_engine(draft)
    damage(folders[1])
    before = engine.proposer
    with pytest.raises(ConfigError, match=message):
        engine.load_draft(folders[1])
    assert engine.proposer is before
    (output,) = engine.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    assert output.stats.proposed > 0
    assert output.stats.draft_versions == [draft.identity.weights_hash[:12]]


def test_a_draft_made_for_another_target_is_refused(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, tmp_path: Path
) -> None:
    other = wrap(tiny_model(target.model.config.vocab_size, seed=9), target.tokenizer, "another")
    save_draft(draft, tmp_path / "foreign", other)
    with pytest.raises(ConfigError, match="was made for another"):
        make_engine(draft).load_draft(tmp_path / "foreign")


def test_a_draft_whose_cache_exceeds_the_budget_is_refused_and_the_old_one_stays(
    target: LanguageModel, draft: LanguageModel, folders: list[Path], make_engine: MakeEngine, tmp_path: Path
) -> None:
    tokens = 4 * (256 + 1)  # the slots' places
    both = tokens * (kv_bytes_per_token(target) + kv_bytes_per_token(draft)) / 2**30
    engine = make_engine(draft, cache_gib=both)
    save_draft(target, tmp_path / "large", target)
    with pytest.raises(ConfigError, match=r"needs 0.00 GiB of cache for 4 slots of 256 tokens, .*the old draft stays"):
        engine.load_draft(tmp_path / "large")
    assert engine.load_draft(folders[1])  # as large as the old one
    engine.close()
    # Without a draft at first there is no share for one.
    late = make_engine(cache_gib=tokens * kv_bytes_per_token(target) / 2**30)
    with pytest.raises(ConfigError, match=r"0.00 are left beside the target's"):
        late.load_draft(folders[0])


@pytest.mark.parametrize("inside", ["", "draft", "best"])
def test_a_draft_of_another_target_is_refused_in_its_run_folder_too(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, tmp_path: Path, inside: str
) -> None:
    other = wrap(tiny_model(target.model.config.vocab_size, seed=9), target.tokenizer, "another")
    save_draft(draft, tmp_path / "run" / inside, other)
    with pytest.raises(ConfigError, match="was made for another"):
        make_engine(draft).load_draft(tmp_path / "run")
    with pytest.raises(ConfigError, match="was made for another"):
        Engine.from_pretrained("tiny", draft=tmp_path / "run", dtype="float32", device="cpu")


def test_a_draft_that_there_is_no_memory_for_is_refused_and_freed(
    draft: LanguageModel, folders: list[Path], make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate tries a candidate again after other errors. Each try would leave another copy."""
    built: list[weakref.ref[torch.nn.Module]] = []

    def no_memory(builder: ProposerBuilder, own: LanguageModel, version: str) -> None:
        built.append(weakref.ref(own.model))
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    engine = make_engine(draft, speculation_length=2)
    monkeypatch.setattr(ProposerBuilder, "build", no_memory)
    with pytest.raises(ConfigError, match="does not fit into what is left of cpu's memory"):
        engine.load_draft(folders[1])
    gc.collect()
    assert [ref() for ref in built] == [None]


@pytest.mark.parametrize("place", ["distillspec.serving.engine_drafts.load_draft", "held"])
@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("tried to allocate 2 GiB"), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
)
def test_a_draft_that_cannot_be_read_or_packed_for_want_of_memory_is_refused(
    target: LanguageModel,
    draft: LanguageModel,
    folders: list[Path],
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    error: Exception,
) -> None:
    wanted = hf_greedy(target, PROMPT, 12)
    engine = make_engine(draft, speculation_length=2)

    def no_memory(*own: Any, **named: Any) -> None:
        raise error

    if place == "held":
        monkeypatch.setattr(HeldModels, "hold", no_memory)
    else:
        monkeypatch.setattr(place, no_memory)
    with pytest.raises(ConfigError, match="does not fit into what is left of cpu's memory"):
        engine.load_draft(folders[1])
    monkeypatch.undo()
    (found,) = engine.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=12))
    assert list(found.token_ids) == wanted
