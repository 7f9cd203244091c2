"""Words on the command line → one checked config: options, misspelt keys, numbers, sweeps."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import get_type_hints

import pytest
from omegaconf import OmegaConf

import distillspec.conf
from distillspec.cli import main
from distillspec.composition import compose, expand_sweep, with_home
from distillspec.config import COMMANDS
from distillspec.errors import ConfigError
from distillspec.hydra_run import resumed_overrides

CONF = Path(next(iter(distillspec.conf.__path__)))
GROUPS = {
    folder.name: sorted(f.stem for f in folder.glob("*.yaml"))
    for folder in CONF.iterdir()
    if folder.is_dir() and folder.name != "__pycache__"
}
# What a command or an option cannot do without.
REQUIRED = {
    "bench": ["bench.prompts=[p]"],
    "eval": ["drafts=[d]"],
    "export": ["draft.path=d"],
    "quality": ["quality.prompts=[p]"],
    "report": ["runs=[r]"],
    "train-stop": ["draft.path=d"],
}
NEEDS = {"draft=pretrained": ["draft.path=d"], "data=fixed": ["data.prompts=p.jsonl"]}
UNFIT = {  # refused
    ("adapt", "loss=tvdpp"),  # the log holds the target's text
    ("quality", "sampling=greedy"),  # exact in every mode
}
INSTALLED = {"tracker=tensorboard": "tensorboard", "tracker=wandb": "wandb"}


def options(command: str) -> list[str]:
    """`group=option` for every group that the command's YAML selects from."""
    defaults = OmegaConf.load(CONF / f"{command}.yaml").defaults
    groups = [next(iter(d)) for d in defaults if not isinstance(d, str)]
    return [f"{g}={option}" for g in groups if g in GROUPS for option in GROUPS[g]]


ALL_OPTIONS = [(command, option) for command in COMMANDS for option in options(command)]
FITTING = [pair for pair in ALL_OPTIONS if pair not in UNFIT]


def test_every_group_is_reached_by_some_command() -> None:
    assert {option.split("=")[0] for _, option in ALL_OPTIONS} == set(GROUPS)


@pytest.mark.parametrize(("command", "option"), FITTING)
def test_every_option_of_every_command_composes(command: str, option: str) -> None:
    if option in INSTALLED:
        pytest.importorskip(INSTALLED[option])
    needs = [*NEEDS.get(option, [])]
    if command == "generate" and option in ("data=draft", "data=mixed"):
        needs.append("draft.path=d")
    config = compose(command, [*REQUIRED.get(command, []), option, *needs])
    group, name = option.split("=")
    chosen = {"target": "path", "loss": "name", "draft": "kind", "tracker": "kind", "launcher": "kind"}
    if group in chosen:
        assert getattr(getattr(config, group), chosen[group]) == name


def test_several_groups_at_once() -> None:
    for loss, data, draft in itertools.product(("tvd", "lk"), ("draft", "teacher"), ("pruned", "scratch")):
        config = compose("train", [f"loss={loss}", f"data={data}", f"draft={draft}", "draft.layers=4"])
        assert (config.loss.name, config.data.source, config.draft.kind) == (loss, data, draft)
    both = compose("train", ["loss=jsd", "loss.beta=0.1", "loss.mix={fkl:1,jsd:{weight:0.5,beta:0.1}}"])
    assert both.loss.terms == {"fkl": 1, "jsd": {"weight": 0.5, "beta": 0.1}}


TRAIN = {name: kind for name, kind in get_type_hints(COMMANDS["train"]).items() if dataclasses.is_dataclass(kind)}
FIRST_KEYS = [f"{group}.{dataclasses.fields(schema)[0].name}" for group, schema in TRAIN.items()]


@pytest.mark.parametrize("key", [*TRAIN, *FIRST_KEYS, "seed", "resume", "train.learning_rate", "data.refresh_prompts"])
def test_a_misspelt_key_is_refused_with_the_right_one(key: str) -> None:
    wrong = key[:-1] + ("y" if key[-1] == "x" else "x")
    with pytest.raises(ConfigError, match=rf"^unknown setting {re.escape(wrong)}; did you mean {re.escape(key)}"):
        compose("train", [f"{wrong}=1"])


NUMBERS = [
    (group, field.name)
    for group, schema in TRAIN.items()
    for field in dataclasses.fields(schema)
    if str(field.type).split(" ")[0] in ("int", "float")
]


@pytest.mark.parametrize(("group", "name"), NUMBERS)
def test_every_number_below_its_range_is_refused_by_name(group: str, name: str) -> None:
    given = {"max_steps": 1} if group == "train" else {}
    with pytest.raises(ConfigError, match=name):
        TRAIN[group](**{**given, name: -1})


@pytest.mark.parametrize("key", ["seed", *{group: f"{group}.{name}" for group, name in NUMBERS}.values()])
def test_a_word_where_a_number_belongs_is_refused_by_name(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)}: Value 'many' .* could not be converted"):
        compose("train", [f"{key}=many"])


def test_a_sweep_expands_like_hydra_does() -> None:
    words = ["-m", "seed=1,2", "loss=glob(t*)", "draft.layers=range(2,4)", "target=tiny"]
    runs = list(expand_sweep(words))
    assert len(runs) == 2 * 2 * 2
    assert runs[0] == ["seed=1", "loss=tvd", "draft.layers=2", "target=tiny"]
    assert runs[-1] == ["seed=2", "loss=tvdpp", "draft.layers=3", "target=tiny"]
    assert list(expand_sweep(["seed=1"])) == [["seed=1"]]


def test_an_error_in_a_sweep_names_the_run_it_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    """A setting may have an effect in one run of a sweep and none in another."""
    assert main(["train", "-m", "loss=jsd,fkl", "loss.beta=.3", "seed=1"]) == 2
    said = "distill: in loss=fkl: loss.beta=.3 needs loss=jsd or loss=jsd_kl; it has no effect here\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "train engine.compile=true",
            "engine.compile is no longer a setting of distill train: the engine that samples",
        ),
        ("train engine=offline", "engine is no longer a setting of distill train: the engine that samples there takes"),
        ("eval drafts=[d] engine.proposer=none", "engine.proposer is no longer a setting of distill eval"),
        ("report runs=[r] seed=1", "seed is no longer a setting of distill report: nothing in it is random"),
        ("train +engine.compile=true", "engine.compile is no longer a setting of distill train"),
        ("train +train.steps=3", "unknown setting train.steps; did you mean train.max_steps?"),
        ("serve +engine.slots=3", "unknown setting engine.slots; did you mean engine.max_slots?"),
    ],
)
def test_a_removed_or_unknown_setting_is_named(line: str, said: str) -> None:
    command, *words = line.split()
    with pytest.raises(ConfigError, match=re.escape(said)):
        compose(command, words)


def test_a_run_that_was_begun_with_a_removed_setting_goes_on_without_it(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- engine.compile=false\n- loss=fkl\n")
    words, folder = resumed_overrides("train", [f"resume={tmp_path}"])
    assert folder == tmp_path
    assert words == ["loss=fkl", f"resume='{tmp_path}'"]
    assert resumed_overrides("generate", [f"resume={tmp_path}"])[0][0] == "engine.compile=false"


def test_a_run_that_was_begun_with_a_renamed_setting_goes_on_with_its_value(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- evaluation.max_gamma=3\n- seed=4\n")
    words, _ = resumed_overrides("train", [f"resume={tmp_path}"])
    assert words[:2] == ["evaluation.speculation_length=3", "seed=4"]
    assert compose("train", words[:1]).evaluation.speculation_length == 3


def test_the_engine_that_samples_is_the_offline_one() -> None:
    """`distill generate` may set every setting of it, the others two."""
    assert compose("train", []).engine.settings == compose("generate", []).engine
    assert (
        compose("train", ["engine.max_slots=3", "engine.speculation_length=2"]).engine.settings
        == compose("generate", ["engine.max_slots=3", "engine.speculation_length=2"]).engine
    )


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("draft.path=~/runs/A", "draft.path={}/runs/A"),
        ("drafts=[~/a,'~/b c']", "drafts=[{0}/a,'{0}/b c']"),
        ("~data.cache", "~data.cache"),
        ("server.key=a~/b", "server.key=a~/b"),
        ("-m", "-m"),
    ],
)
def test_paths_may_begin_at_home(word: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    assert with_home(word) == wanted.format("/home/me")
