"""The command line as a person meets it: help, one clear line for each mistake, and nothing half-written."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from omegaconf import OmegaConf

import distillspec.conf
from distillspec import __version__
from distillspec.composition import compose, expand_sweep
from distillspec.config import COMMANDS
from distillspec.errors import ConfigError
from distillspec.models.tiny import tiny_model

from .conftest import Distill

CONF = Path(next(iter(distillspec.conf.__path__)))
GROUPS = {folder.name: sorted(f.stem for f in folder.glob("*.yaml")) for folder in CONF.iterdir() if folder.is_dir()}
FAST = ("experiment=smoke", "train.dtype=float32", "evaluation.measure_cost=false", "evaluation.bootstrap_samples=10")
# What a command or an option cannot do without.
REQUIRED = {"bench": ["bench.prompts=[p]"], "eval": ["drafts=[d]"], "export": ["draft.path=d"], "report": ["runs=[r]"]}
NEEDS = {"draft=pretrained": ["draft.path=d"], "data=fixed": ["data.prompts=p.jsonl"]}
UNFIT = {("adapt", "loss=tvdpp")}  # refused: the log holds the target's text
INSTALLED = {"tracker=tensorboard": "tensorboard", "tracker=wandb": "wandb"}


def settings(schema: Any, prefix: str = "") -> list[str]:
    """The dotted name of every setting of a schema."""
    names: list[str] = []
    for field in dataclasses.fields(schema):
        kind = get_type_hints(schema)[field.name]
        name = f"{prefix}{field.name}"
        names += settings(kind, f"{name}.") if dataclasses.is_dataclass(kind) else [name]
    return names


def assert_refused(outcome: Any, folder: Path, *words: str) -> None:
    """Exit code 2, one line on stderr with the given words, and an empty folder."""
    assert outcome.code == 2, outcome
    assert outcome.err.count("\n") == 1, outcome.err
    assert outcome.err.startswith("distill: ")
    assert "Traceback" not in outcome.out + outcome.err
    for word in words:
        assert word in outcome.err, outcome.err
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",), ("help",)])
def test_help_names_every_command(distill: Any, words: tuple[str, ...]) -> None:
    outcome = distill(*words)
    assert (outcome.code, outcome.err) == (0, "")
    assert all(f"  {command} " in outcome.out for command in COMMANDS)
    assert "Exit codes" in outcome.out


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_shows_every_setting(distill: Any, tmp_path: Path, command: str) -> None:
    outcome = distill(command, "--help")
    assert (outcome.code, outcome.err) == (0, "")
    lines = [line.strip() for line in outcome.out.splitlines()]
    for name in settings(COMMANDS[command]):
        assert any(line.startswith(f"{name}=") for line in lines), name
    assert f"Example: distill {command}" in outcome.out
    assert list(tmp_path.iterdir()) == []


def test_the_version(distill: Any) -> None:
    assert distill("--version").out == f"distillspec {__version__}\n"


def test_distill_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "distillspec.cli", "trian"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "unknown command 'trian'" in done.stderr
    assert done.stdout == ""


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


@pytest.mark.parametrize("command", COMMANDS)
def test_the_example_in_the_help_composes(distill: Any, command: str) -> None:
    line = next(line for line in distill(command, "--help").out.splitlines() if line.startswith("Example: "))
    words = line.removeprefix("Example: ").split()
    assert words[:2] == ["distill", command]
    compose(command, words[2:])


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


STATIC = [
    ("train loss=fkll", "loss=fkll is not known; use one of ce, fkl, jsd"),
    ("train target=nope", "target=nope is not known; use one of smollm2, tiny"),
    ("train experiment=nope", "experiment=nope is not known; use one of smoke"),
    ("train lauchner=ddp", "unknown setting lauchner; did you mean launcher?"),
    ("train +sed=1", "unknown setting sed; did you mean seed?"),
    ("train hydra.run.dri=x", "unknown setting hydra.run.dri"),
    ("train loss", "cannot read 'loss'; settings are key=value"),
    ("train draft.layers=[", "cannot read 'draft.layers=['"),
    ("train --layers=3", "unknown flag --layers=3"),
    ("train loss=fkl,tvd", "loss=fkl,tvd"),
    ("train draft.keep=3", "draft.keep"),
    ("train draft.keep=[1,1]", "draft.keep=[1, 1] must be distinct"),
    ("train draft.keep=[0,1] draft.layers=3", "disagree"),
    ("train draft=pretrained", "draft=pretrained needs draft.path"),
    ("train draft.hidden_size=30 draft.heads=4", "draft.hidden_size=30 must be an even multiple of draft.heads=4"),
    ("train draft=scratch draft.hidden_size=0", "draft.hidden_size=0"),
    ("train draft=scratch draft.hidden_size=12", "draft.hidden_size=12 must be an even multiple of draft.heads=4"),
    ("train draft=scratch draft.keep=[0]", "draft.keep=[0] names the target's layers: use draft=pruned"),
    ("train draft.path=d", "draft.path=d has no part in draft=pruned; add draft=pretrained"),
    ("train draft.keep=[[1]]", "draft.keep"),
    ("train draft=scratch draft.select=acceptance", "draft.select=acceptance chooses among the target's layers"),
    ("train draft.keep=[0] draft.select=acceptance", "draft.select=acceptance chooses among the target's layers"),
    ("train draft.hidden_size=128", "draft.hidden_size=128 shapes a draft from scratch: add draft=scratch"),
    ("train draft=pretrained draft.path=d draft.heads=2", "draft.heads=2 shapes a draft from scratch"),
    ("train draft=pretrained draft.path=d draft.layers=2", "draft.layers=2 needs draft=pruned or draft=scratch"),
    ("train data.mixed_lambda=0.3", "data.mixed_lambda=0.3 needs data=mixed"),
    (
        "train data=mixed data.mixed_by=token data.mixed_with=teacher",
        "mixed_with=teacher needs data.mixed_by=sequence",
    ),
    (
        "train data.cache=d data.num_prompts=9",
        "data.num_prompts=9 needs data.cache=null: a cache brings its own prompts",
    ),
    ("train data.generator=engine data.batch_slots=8", "data.batch_slots=8 needs data.generator=slots"),
    ("train train.schedule=cosine train.decay_fraction=0.5", "train.decay_fraction=0.5 needs train.schedule=wsd"),
    ("train train.eval_every=9 train.eval_share=0.5", "train.eval_share=0.5 needs train.max_minutes, and"),
    ("eval drafts=[d] evaluation.speedup_tokens=9", "speedup_tokens=9 needs evaluation.measure_speedup=true"),
    ("train tracker.name=x", "tracker.name=x needs tracker=wandb or tracker=tensorboard"),
    ("train data.refresh_keep=3", "data.refresh_keep=3 needs data=draft or data=mixed"),
    ("train data=draft loss=tvdpp data.refresh_keep=3", "data.refresh_keep=3: loss tvdpp learns only from what"),
    ("train loss.reference=d", "loss.reference=d needs loss.select_fraction"),
    ("train train.eval_share=0", "train.eval_share=0.0 must be between 0 and 1"),
    ("train train.betas=[[1],2]", "train.betas"),
    ("train tracker.tags=[[1]]", "tracker.tags"),
    ("train train.learning_rate=null", "train.learning_rate=null is not possible"),
    ("train data.temperature=inf", "data.temperature=inf must be at least 0 and finite"),
    ("train sampling.temperature=inf", "sampling.temperature=inf"),
    ("train loss.eta=inf", "loss.eta=inf must be at least 0 and finite"),
    ("train loss.mix={jsd:{beta:7}}", "jsd beta=7 must lie strictly between 0 and 1"),
    ("train loss.mix={lk_hybrid:{eta:nan}}", "lk_hybrid eta=nan must be finite"),
    ("train loss=rkl data.signal=sampled", "loss rkl needs the target's distribution, and data.signal=sampled"),
    ("train loss=tvdpp", "loss tvdpp learns only from text that the draft wrote, and data.source=teacher"),
    ("train loss=tvdpp data=mixed data.mixed_by=token", "loss tvdpp learns only from text that the draft wrote"),
    ("adapt loss=tvdpp", "loss=tvdpp needs text that the draft wrote; the log holds the target's"),
    ("adapt judge=true", "judge=true goes with once=true"),
    ("serve replay.share=1", "replay.share=1.0 needs online adaptation: add online=on"),
    ("serve online=on engine.proposer=none", "online=on teaches a draft, and engine.proposer=none uses none"),
    ("serve online=on server.drafts_folder=d", "server.drafts_folder=d goes with online=off"),
    ("serve online=on loss=tvdpp", "loss=tvdpp needs text that the draft wrote; the log holds the target's"),
    ("adapt judge=true once=true gate.canary_requests=9", "gate.canary_requests=9 needs live traffic"),
    ("adapt adapt.lora_by=domain", "give them a rank: adapt.lora_rank=8"),
    ("replay action=delete", "name the tenant whose records go: tenant=NAME"),
    ("versions action=promote", "name the version to promote: version=NAME"),
    ("train target.dtype=int8", "target.dtype=int8 is not known"),
    ("train loss.select_fraction=0.5", "loss.select_fraction needs loss.reference"),
    ("train loss.mix={}", "loss.mix={} must give losses a weight"),
    ("train loss.temperature=2", "add data.signal=none"),
    ("train data.source=fixed", "self-written prompts have no fixed responses"),
    ("train data.generator=engine launcher=ddp", "data.generator=engine samples in one process; use launcher=local"),
    ("train engine.speculation_length=2", "engine.speculation_length=2 needs data.generator=engine"),
    ("generate data.generator=engine engine.max_slots=0", "max_slots=0 must be at least 1"),
    ("generate data.generator=engine engine.compile=perhaps", "compile=perhaps must be auto, true or false"),
    ("generate data.generator=engine engine.slots=4", "unknown setting engine.slots; did you mean engine.max_slots?"),
    ("generate data.generator=engine engine=big", "engine=big is not known; use one of default, offline"),
    ("train data.source=students", "data.source=students is not known; use one of fixed, teacher, draft, mixed"),
    ("train train.max_minutes=null", "the run has no end"),
    ("train train.betas=[0.9]", "train.betas=[0.9] must be two numbers"),
    ("train train.betas=[0.9,1.5]", "train.betas=[0.9, 1.5]"),
    ("train train.learning_rate=nan", "train.learning_rate=nan"),
    ("train train.row_tokens=9000", "train.batch_tokens=768 is below train.row_tokens=9000"),
    ("train evaluation.bootstrap_samples=99999999999999999999", "must be in 10..100000"),
    ("train evaluation.cost_batches=[0]", "evaluation.cost_batches=[0]"),
    ("train evaluation.cost_batches=[]", "evaluation.cost_batches=[]"),
    ("train launcher.num_processes=3", "launcher=local runs one process, not 3"),
    ("train seed=-1", "seed=-1"),
    ("train resume=nowhere", "resume=nowhere is not a run folder"),
    ("train -m loss=fkl,nope", "loss=nope is not known"),
    ("train -m draft.layers=2,0", "draft.layers=0 is impossible"),
    ("eval", "name the drafts to judge"),
    ("export", "name the draft to export"),
    ("export draft.path=d format=gguf", "format=gguf is not known; use one of hf, vllm, sglang"),
    ("export draft.path=d gamma=0", "gamma=0"),
    ("report", "name the run folders"),
    ("report runs=['']", "name the run folders"),
    ("report runs=[[1]]", "runs must be a list of folders, not [[1]]"),
    ("export draft.path=d gamma=99999999999999999999", "must be in 1..32"),
    ("generate target=tiny draft.path=d", "draft.path=d writes nothing in data.source=teacher"),
    ("init-draft target=tiny data.prompts=nowhere.jsonl", "data.prompts=nowhere.jsonl: no such file"),
    ("init-draft target=tiny data.cache=nowhere", "data.cache=nowhere is not a data folder"),
    ("generate data=draft", "needs the draft that writes: draft.path=FOLDER"),
    ("init-draft draft.layers=0", "draft.layers=0 is impossible"),
]


@pytest.mark.parametrize(("line", "said"), STATIC)
def test_what_is_wrong_in_itself_is_refused(distill: Any, tmp_path: Path, line: str, said: str) -> None:
    assert_refused(distill(*line.split()), tmp_path, said)


DYNAMIC = [
    ("train {} draft.layers=99", "draft.layers=99 is impossible: the target has 4 layers"),
    ("train {} draft.keep=[0,9]", "draft.keep=[0, 9] names layer 9"),
    ("train {} draft.vocabulary=100000", "draft.vocabulary=100000 exceeds the target's vocabulary of 259"),
    ("train {} draft=pretrained draft.path=./nowhere", "./nowhere is not a model folder"),
    ("train {} target.path=./nowhere", "./nowhere is not a model folder: it has no config.json"),
    ("train {} target.path=nowhere.gguf", "target.path=nowhere.gguf: no such file"),
    ("train {} target.device=toaster", "device=toaster cannot be used on this machine"),
    ("train {} data.cache=nowhere", "data.cache=nowhere is not a data folder"),
    ("train {} data.prompts=nowhere.jsonl", "data.prompts=nowhere.jsonl: no such file"),
    ("train {} data.max_new_tokens=5000", "data.max_new_tokens=5000 leaves no room"),
    ("train {} loss.reference=nowhere loss.select_fraction=0.5", "nowhere is not a distillspec draft"),
    ("train {} loss.mix={{klf:1}}", "unknown loss 'klf'"),
    ("eval drafts=[nowhere] target=tiny", "nowhere is not a draft"),
    ("export draft.path=nowhere target=tiny", "nowhere is not a draft"),
    ("report runs=[nowhere]", "nowhere is not a run folder"),
    ("generate target=tiny data=draft draft.path=nowhere", "nowhere is not a draft"),
    ("init-draft target=tiny draft.layers=99", "draft.layers=99 is impossible: the target has 4 layers"),
    ("train -m {} draft.layers=98,99", "draft.layers=98 is impossible"),
]


@pytest.mark.parametrize(("line", "said"), DYNAMIC)
def test_what_only_the_model_or_the_disk_can_tell_is_refused_too(
    distill: Any, tmp_path: Path, line: str, said: str
) -> None:
    assert_refused(distill(*line.format("experiment=smoke").split()), tmp_path, said)


def test_another_tokenizers_draft_is_refused_before_anything_is_sampled(distill: Any, tmp_path: Path) -> None:
    from distillspec.models.tiny import tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tiny_model(300, layers=1).save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    outcome = distill("train", *FAST, "draft=pretrained", "draft.path=other")
    assert outcome.code == 2
    assert "id 259 is '<new>' in the draft and None in the target" in outcome.err
    assert outcome.err.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["other"]


def test_a_sweep_is_checked_whole_before_anything_is_written(distill: Any, tmp_path: Path) -> None:
    assert_refused(distill("train", "-m", *FAST, "loss=fkl,tvd", "train.max_steps=2,0"), tmp_path, "train.max_steps=0")


def test_a_sweep_expands_like_hydra_does() -> None:
    words = ["-m", "seed=1,2", "loss=glob(t*)", "draft.layers=range(2,4)", "target=tiny"]
    runs = list(expand_sweep(words))
    assert len(runs) == 2 * 2 * 2
    assert runs[0] == ["seed=1", "loss=tvd", "draft.layers=2", "target=tiny"]
    assert runs[-1] == ["seed=2", "loss=tvdpp", "draft.layers=3", "target=tiny"]
    assert list(expand_sweep(["seed=1"])) == [["seed=1"]]


@pytest.mark.parametrize("where", ["open_run", "mkdir", "late"])
def test_a_full_disk_is_one_line_and_exit_code_1(
    distill: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "some/file")

    places = {
        "open_run": "distillspec.files.os.replace",
        "mkdir": "pathlib.Path.mkdir",
        "late": "distillspec.files.os.fsync",
    }
    monkeypatch.setattr(places[where], full)
    outcome = distill("report", "runs=[nowhere]") if where == "mkdir" else distill("train", *FAST)
    monkeypatch.undo()
    assert outcome.code == 1
    assert outcome.err.count("\n") == 1
    assert "No space left on device" in outcome.err or "the disk is full" in outcome.err
    assert "Traceback" not in outcome.out
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_folder_that_cannot_be_made_is_one_line(distill: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcome = distill("report", "runs=[nowhere]", "hydra.run.dir=file/run")
    assert outcome.code == 1
    assert outcome.err.count("\n") == 1
    assert "file" in outcome.err


def test_a_run_leaves_what_it_promises(distill: Any, tmp_path: Path, data_folder: Path) -> None:
    outcome = distill("train", *FAST, f"data.cache={data_folder}", "train.max_steps=3", "hydra.run.dir=run", "seed=5")
    assert outcome.code == 0, outcome.err
    assert outcome.out.splitlines()[-1] == "results: run"
    run = tmp_path / "run"
    config = OmegaConf.load(run / "config.yaml")
    assert (config.train.max_steps, config.seed, config.target.path, config.draft.layers) == (3, 5, "tiny", 2)
    provenance = json.loads((run / "provenance.json").read_text())
    assert provenance["argv"][:3] == ["distill", "train", "experiment=smoke"]
    assert provenance["seed"] == 5
    assert {"packages", "hardware", "git_commit", "started", "distillspec"} <= set(provenance)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["command"] == "train"
    assert (summary["steps"], summary["stopped_by"], summary["bad_steps"]) == (3, "steps", 0)
    assert summary["after"]["alpha"]["low"] <= summary["after"]["alpha"]["mean"] <= summary["after"]["alpha"]["high"]
    assert len(summary["before"]["tau"]) == 8
    assert summary["best"].keys() == {"step", "alpha"}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3]
    assert {"tokens", "seconds", "train/alpha", "train/lr", "train/grad_norm", "train/tokens_per_s"} <= set(lines[0])
    assert {"eval/alpha", "eval/alpha_low", "eval/tau_4", "eval/greedy_agreement"} <= set(lines[-1])
    assert (run / "draft" / "distillspec.json").is_file()
    assert not (run / "data").exists()  # the cache was enough


def test_a_sweep_makes_a_folder_for_each_run(distill: Any, tmp_path: Path, data_folder: Path) -> None:
    """Two losses in two precisions: nothing of the first run may stand in the second's way."""
    outcome = distill(
        "train", "-m", "experiment=smoke", *FAST[2:], f"data.cache={data_folder}", "train.max_steps=1", "loss=fkl,tvd",
        "train.dtype=float32,bfloat16",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    runs = sorted(path.parent for path in tmp_path.rglob("summary.json"))
    assert len(runs) == 4
    chosen = [OmegaConf.load(run / "config.yaml") for run in runs]
    assert [(c.loss.name, c.train.dtype) for c in chosen] == [
        (loss, dtype) for loss in ("fkl", "tvd") for dtype in ("float32", "bfloat16")
    ]
    assert all(set(run.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_.-+") for run in runs)
    last = distill("train", f"resume={runs[-1].relative_to(tmp_path)}", "train.max_steps=2")
    assert last.code == 0, last.err
    assert json.loads((runs[-1] / "summary.json").read_text())["steps"] == 2
    assert OmegaConf.load(runs[-1] / "config.yaml").loss.name == "tvd"


def test_a_refused_resume_leaves_the_run_as_it_was(distill: Any, tmp_path: Path, data_folder: Path) -> None:
    name = "a run, named=oddly"
    done = distill("train", *FAST, f"data.cache={data_folder}", "train.max_steps=1", f"hydra.run.dir='{name}'")
    assert done.code == 0, done.err
    files = {p: p.read_bytes() for p in (tmp_path / name).rglob("*.yaml") if p.parent.name == ".hydra"}
    refused = distill("train", f"resume={name}", "draft.layers=99")
    assert refused.code == 2
    assert (
        files[tmp_path / name / ".hydra" / "overrides.yaml"]
        == (tmp_path / name / ".hydra" / "overrides.yaml").read_bytes()
    )
    again = distill("train", f"resume={name}", "train.max_steps=2")
    assert again.code == 0, again.err
    assert again.out.splitlines()[-1] == f"results: {name}"


def test_a_draft_is_judged_on_its_own_runs_prompts_that_chose_nothing(distill: Any, tmp_path: Path) -> None:
    """Of four held-out prompts two choose the best checkpoint; `distill eval` finds the other two again."""
    trained = distill("train", *FAST, "train.max_steps=2", "hydra.run.dir=trained")
    assert trained.code == 0, trained.err
    summary = json.loads((tmp_path / "trained" / "summary.json").read_text())
    assert (summary["selection_prompts"], summary["after"]["prompts"], summary["before"]["prompts"]) == (2, 2, 2)
    assert 0 < summary["after"]["cut"] <= 1  # 24 tokens of the tiny target hardly ever end a text
    assert 0 < summary["training_answers_cut"] <= 1
    assert "of the held-out answers were cut at the token limit" in trained.out

    quick = ("target=tiny", "evaluation.measure_cost=false", "evaluation.bootstrap_samples=10")
    judged = distill("eval", *quick, "drafts=[trained,trained/initial]", "hydra.run.dir=judged")
    assert judged.code == 0, judged.err
    assert "left out 2 held-out prompts: a draft was trained on or chosen by them" in judged.out
    assert "judged on 2 held-out prompts of trained/data" in judged.out
    found = json.loads((tmp_path / "judged" / "summary.json").read_text())
    assert found["results"][0]["alpha"]["mean"] == pytest.approx(summary["after"]["alpha"]["mean"])
    assert not (tmp_path / "judged" / "data").exists()  # nothing was written anew
    assert "trained/initial against trained/draft on the same 2 prompts: α " in judged.out
    assert found["pairs"][0]["alpha"]["mean"] == pytest.approx(
        found["results"][1]["alpha"]["mean"] - found["results"][0]["alpha"]["mean"]
    )

    longer = distill("eval", *quick, "drafts=[trained]", "data.max_new_tokens=256", "hydra.run.dir=longer")
    assert longer.code == 0, longer.err
    assert "judged on 2 held-out prompts of trained/data" in longer.out  # the run's prompts, not its 24 tokens
    text = json.loads((tmp_path / "longer" / "summary.json").read_text())["results"][0]
    assert text["positions"] > found["results"][0]["positions"]


def test_an_evaluation_writes_no_training_prompts(distill: Any, tmp_path: Path, given: Path) -> None:
    words = ("data.eval_prompts=3", "data.max_new_tokens=12", "evaluation.measure_cost=false")
    judged = distill("eval", "target=tiny", f"drafts=[{given}]", *words, "hydra.run.dir=judged")
    assert judged.code == 0, judged.err
    prompts = (tmp_path / "judged" / "data" / "prompts.jsonl").read_text().splitlines()
    assert [json.loads(line)["split"] for line in prompts].count("held_out") == 3
    assert len(prompts) <= 4  # a split has at least one prompt to train on


def test_the_other_commands_from_one_draft(distill: Any, tmp_path: Path, data_folder: Path) -> None:
    """init-draft, eval, export and report, each on what the one before left."""
    made = distill("init-draft", "target=tiny", "draft.layers=2", "hydra.run.dir=made")
    assert made.code == 0, made.err
    summary = json.loads((tmp_path / "made" / "summary.json").read_text())
    assert (summary["command"], summary["lineage"]["target_layers"], summary["width"]) == ("init-draft", [0, 3], 259)
    assert not (tmp_path / "made" / "data").exists()  # nothing had to be sampled

    trained = distill("train", *FAST, f"data.cache={data_folder}", "train.max_steps=2", "hydra.run.dir=trained")
    assert trained.code == 0, trained.err
    judged = distill(
        "eval", "target=tiny", "drafts=[made,trained]", f"data.cache={data_folder}", "hydra.run.dir=judged",
        "evaluation.bootstrap_samples=10", "evaluation.cost_batches=[1]",
    )  # fmt: skip
    assert judged.code == 0, judged.err
    results = json.loads((tmp_path / "judged" / "summary.json").read_text())["results"]
    assert len(results) == 2
    assert results[1]["alpha"]["mean"] > results[0]["alpha"]["mean"]
    assert (tmp_path / "judged" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / "judged" / "table.txt").read_text()
    assert table.strip() in judged.out

    exported = distill("export", "draft.path=trained", "target=tiny", "format=hf", "hydra.run.dir=exported")
    assert exported.code == 0, exported.err
    assert (tmp_path / "exported" / "export" / "model.safetensors").is_file()
    assert json.loads((tmp_path / "exported" / "summary.json").read_text())["command"] == "export"

    reported = distill("report", "runs=[trained,judged]", "hydra.run.dir=reported")
    assert reported.code == 0, reported.err
    assert "<html" in (tmp_path / "reported" / "report.html").read_text()
    for run, command in (("made", "init-draft"), ("judged", "eval"), ("exported", "export"), ("reported", "report")):
        assert json.loads((tmp_path / run / "provenance.json").read_text())["argv"][1] == command
        assert (tmp_path / run / "config.yaml").is_file()


@pytest.mark.parametrize("command", ["generate", "train", "eval", "init-draft draft.vocabulary=64"])
def test_a_target_without_tokenizer_is_refused_where_text_is_needed(
    command: str, given: Path, distill: Distill, tmp_path: Path
) -> None:
    tiny_model(264).save_pretrained(tmp_path / "bare")
    words = [f"drafts=[{given}]"] if command == "eval" else ["data.num_prompts=8"]
    outcome = distill(*command.split(), "target.path=bare", *words, "data.eval_prompts=4")
    assert outcome.code == 2
    (line,) = [line for line in outcome.err.splitlines() if line.startswith("distill: ")]
    assert line.startswith("distill: bare has no tokenizer, so it cannot read text; add its tokenizer files")
