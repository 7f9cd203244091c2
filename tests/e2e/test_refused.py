"""Mistakes: one clear line each, exit code 2, and nothing written."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from distillspec.models.tiny import tiny_model, tiny_tokenizer

from .conftest import FAST, Distill


def assert_refused(outcome: Any, folder: Path, *words: str) -> None:
    """Exit code 2, one line on stderr with the given words, and an empty folder."""
    assert outcome.code == 2, outcome
    assert outcome.err.count("\n") == 1, outcome.err
    assert outcome.err.startswith("distill: ")
    assert "Traceback" not in outcome.out + outcome.err
    for word in words:
        assert word in outcome.err, outcome.err
    assert list(folder.iterdir()) == []


STATIC = [
    ("train loss=fkll", "loss=fkll is not known; use one of ce, fkl, jsd"),
    ("train target=nope", "target=nope is not known; use one of smollm2, tiny"),
    ("train experiment=nope", "experiment=nope is not known; use one of smoke, ten-minutes"),
    ("train lauchner=ddp", "unknown setting lauchner; did you mean launcher?"),
    ("train +sed=1", "unknown setting sed; did you mean seed?"),
    ("serve target=tiny draft=/a/b", "draft has settings of its own; did you mean draft.path?"),
    ("serve target=/a/b", "target=/a/b is not known; use one of smollm2, tiny, or target.path=/a/b"),
    ("serve target=tiny engine=8", "engine=8 is not known; use one of default, offline"),
    ("train draft=/a/b", "draft=/a/b is not known; use one of block, eagle, medusa, pretrained, pruned, scratch"),
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
    ("train draft.hidden_size=128", "draft.hidden_size=128 has no part in draft=pruned; add draft=scratch"),
    (
        "train draft=pretrained draft.path=d draft.heads=2",
        "draft.heads=2 has no part in draft=pretrained; add draft=scratch",
    ),
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
    ("generate data.cache=d", "data.cache=d: distill generate writes a data folder of its own; leave it out"),
    ("train data.generator=engine data.batch_slots=8", "data.batch_slots=8 needs data.generator=slots"),
    ("train train.schedule=cosine train.decay_fraction=0.5", "train.decay_fraction=0.5 needs train.schedule=wsd"),
    ("train train.eval_every=9 train.eval_share=0.5", "train.eval_share=0.5 needs train.max_minutes, and"),
    ("eval drafts=[d] evaluation.speedup_tokens=9", "speedup_tokens=9 needs evaluation.measure_speedup=true"),
    ("train tracker.name=x", "tracker.name=x needs tracker=wandb or tracker=tensorboard"),
    ("train data.refresh_keep=3", "data.refresh_keep=3 needs data=draft or data=mixed"),
    ("train data=draft loss=tvdpp data.refresh_keep=3", "data.refresh_keep=3: loss tvdpp learns only from what"),
    ("train draft=block draft.confidence=true loss=ce", "draft.confidence=true learns from the target's probabilities"),
    ("train loss.reference=d", "loss.reference=d needs loss.select_fraction"),
    ("train train.eval_share=0", "train.eval_share=0.0 must be between 0 and 1"),
    ("train train.unroll_from=1", "train.unroll_from=1.0 must be in [0, 1)"),
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
    ("train loss=tvdpp data=draft data.temperature=0", "data.temperature=0: loss tvdpp learns from tokens that are"),
    ("train loss=tvdpp data=mixed data.mixed_by=token", "loss tvdpp learns only from text that the draft wrote"),
    ("adapt loss=tvdpp", "loss=tvdpp needs text that the draft wrote; the log holds the target's"),
    ("adapt judge=true", "judge=true goes with once=true"),
    ("serve replay.share=1", "replay.share=1 needs online=on or online=decoupled"),
    ("serve online=on engine.proposer=none", "online=on teaches a draft, and engine.proposer=none uses none"),
    ("serve online=on server.drafts_folder=d", "server.drafts_folder=d goes with online=off"),
    ("adapt retrain_without=acme", "retrain_without=acme goes with once=true"),
    ("versions action=withdraw", "name the draft to withdraw: name=NAME"),
    ("adapt adapt.specialist_below=2", "adapt.specialist_below=2.0 must be in (0, 1], or null for none"),
    ("serve draft.path=a drafts=[b,c]", "draft.path=a names one draft and drafts= several"),
    ("serve drafts=[nowhere,neither]", "nowhere is not a draft"),
    ("serve drafts=[a,b] engine.selection=best", "selection=best is not known; use one of goodput, lbss"),
    ("serve online=on loss=tvdpp", "loss=tvdpp needs text that the draft wrote; the log holds the target's"),
    ("serve engine.tree=given engine.widths=[4,4,4]", "has 84 tokens, above nodes=32; give nodes=84"),
    ("serve engine.tree=medusa engine.proposer=ngram", "proposer=ngram uses no draft; use tree=topk"),
    ("adapt gate.evidence=guess", "gate.evidence"),
    ("replay action=delete", "action=delete needs the tenant's name: tenant=NAME"),
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
    ("train draft.train_target=true", "draft.train_target=True has no part in draft=pruned; add draft=medusa"),
    ("init-draft draft=medusa draft.train_target=true", "draft.train_target=true needs distill train"),
    (
        "train draft=medusa draft.train_target=true launcher=ddp launcher.num_processes=2",
        "draft.train_target=true trains in one process, not with launcher=ddp; use launcher=local",
    ),
    (
        "train draft=medusa draft.train_target=true loss.select_fraction=0.5 loss.reference=d",
        "loss.select_fraction=0.5 compares with a draft of the same target",
    ),
    (
        "train draft=medusa draft.train_target=true data=draft",
        "data.source=draft needs a target that stays, and draft.train_target=true trains it; use data=teacher or",
    ),
    ("train draft=medusa train.target_rate=0.1", "train.target_rate=0.1 needs draft.train_target=true"),
    ("train draft=medusa train.target_rate=0", "train.target_rate=0.0 must be above 0 and at most 1"),
    ("train draft=medusa train.target_warmup=1", "train.target_warmup=1.0 must be in [0, 1)"),
    ("train draft=medusa train.target_weight=0", "train.target_weight=0.0 must be above 0 and finite"),
    (
        "train draft=medusa draft.train_target=true train.feature_gib=1",
        "train.feature_gib=1 needs draft.train_target=false",
    ),
    (
        "train draft=medusa draft.train_target=true data.state_precision=fp8",
        "data.state_precision=fp8 needs data.state_ids",
    ),
    ("train resume=nowhere", "resume=nowhere is not a run folder"),
    ("train -m loss=fkl,nope", "loss=nope is not known"),
    ("train -m draft.layers=2,0", "draft.layers=0 is impossible"),
    ("eval", "name the drafts to judge"),
    ("eval drafts=[d] draft.path=e", "unknown setting draft.path; distill eval judges finished drafts: drafts=[FOLDER"),
    ("eval draft=eagle drafts=[d]", "unknown setting draft; distill eval judges finished drafts: drafts=[FOLDER"),
    ("export", "name the draft to export"),
    ("export draft.path=d format=gguf", "format=gguf is not known; use one of hf, vllm, sglang, speculators"),
    ("export draft.path=d speculation_length=0", "speculation_length=0"),
    ("report", "name the run folders"),
    ("report runs=['']", "name the run folders"),
    ("report runs=[[1]]", "runs must be a list of folders, not [[1]]"),
    ("export draft.path=d speculation_length=99999999999999999999", "must be in 1..32"),
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("engine.proposer=[ngram,draft_model]", "needs a draft; give draft.path=RUN"),
        ("engine.tree=medusa", "tree=medusa needs a draft of kind medusa; give draft.path=RUN"),
        ("engine.tree=medusa draft.path=GIVEN", "tree=medusa needs a draft of kind medusa, not pruned"),
    ],
)
def test_a_source_that_is_not_loaded_and_a_tree_that_the_draft_cannot_grow_are_refused(
    words: str, said: str, given: Path, distill: Distill, tmp_path: Path
) -> None:
    outcome = distill("serve", "target=tiny", "server.port=0", *words.replace("GIVEN", str(given)).split())
    assert outcome.code == 2
    (line,) = [line for line in outcome.err.splitlines() if line.startswith("distill: ")]
    assert said in line
    assert "Traceback" not in outcome.out + outcome.err
    assert list(tmp_path.iterdir()) == []
