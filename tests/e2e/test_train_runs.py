"""Every way of feeding a run, each for a few steps on the tiny target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from distillspec.data.folder import DataFolder
from distillspec.data.shards import read_samples
from distillspec.signals import SignalRequest
from distillspec.training.checkpoint import load_newest

FAST = (
    "experiment=smoke",
    "train.max_steps=3",
    "train.eval_every=3",
    "train.dtype=float32",
    "evaluation.measure_cost=false",
    "evaluation.bootstrap_samples=10",
    "hydra.run.dir=run",
)


def steps(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/loss" in line]


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    rows = [{"prompt": f"Say {i} twice.", "response": f"{i} {i}", "domain": "ab"[i % 2]} for i in range(14)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "prompts.jsonl"


@pytest.mark.parametrize(
    "words",
    [
        ("data=draft", "loss=tvdpp", "draft.vocabulary=100"),
        ("data=mixed", "data.mixed_by=sequence", "loss=rkl"),
        ("data=mixed", "data.mixed_by=token", "loss=lk"),
        ("data=draft", "data.generator=engine", "draft.vocabulary=100"),
    ],
)
def test_on_policy_runs(distill: Any, tmp_path: Path, data_folder: Path, words: tuple[str, ...]) -> None:
    on_policy = (f"data.cache={data_folder}", "data.refresh_steps=2", "data.refresh_prompts=8")
    outcome = distill("train", *FAST, *words, *on_policy)
    assert outcome.code == 0, outcome.err
    assert len(steps(tmp_path / "run")) == 3
    assert summary(tmp_path / "run")["bad_steps"] == 0
    fresh = read_samples(tmp_path / "run" / "checkpoints" / "step-00000003" / "fresh")
    wanted = {"draft"} if "data=draft" in words else {"mixed"} if "token" in words[1] else {"draft", "teacher"}
    assert {s.source for s in fresh} == wanted
    assert len(fresh) == (8 if "loss=tvdpp" in words else 16)  # of the last two refreshes, of 8 prompts each
    assert ("what it writes is noise" in outcome.out) == ("data=draft" in words)
    assert all((sample.writer_logprobs is not None) == ("loss=tvdpp" in words) for sample in fresh)
    if "data.mixed_by=sequence" in words:
        recorded = read_samples(data_folder / "data" / "samples")
        assert {s.response_ids for s in fresh if s.source == "teacher"} <= {s.response_ids for s in recorded}


def test_a_vocabulary_is_chosen_without_samples_in_the_cache(distill: Any, tmp_path: Path) -> None:
    """An on-policy run has prompts and held-out answers alone, which another one takes from it."""
    on_policy = ("data=draft", "data.refresh_prompts=8")
    assert distill("train", *FAST[:-1], *on_policy, "hydra.run.dir=first").code == 0
    assert not (tmp_path / "first" / "data" / "samples").exists()
    outcome = distill("train", *FAST, *on_policy, "data.cache=first", "draft.vocabulary=100")
    assert outcome.code == 0, outcome.err
    record = json.loads((tmp_path / "run" / "draft" / "distillspec.json").read_text())
    assert record["kept_vocabulary"] == 100


def test_fresh_text_is_scored_once_where_a_signal_is_asked_for(distill: Any, tmp_path: Path, data_folder: Path) -> None:
    words = ("data=mixed", "data.signal=topk", "data.signal_entries=16", "data.refresh_prompts=8")
    outcome = distill("train", *FAST, *words, f"data.cache={data_folder}")
    assert outcome.code == 0, outcome.err
    fresh = read_samples(tmp_path / "run" / "checkpoints" / "step-00000003" / "fresh")
    assert {s.source for s in fresh} == {"draft", "teacher"}
    assert {s.signal.request for s in fresh if s.signal is not None} == {SignalRequest("topk", 16, tail_draws=4)}
    assert all(s.signal is not None and len(s.signal) == len(s.response_ids) for s in fresh)


def test_teacher_answers_a_mixed_run_without_a_cache(distill: Any, tmp_path: Path) -> None:
    words = ("data=mixed", "data.refresh_prompts=8", "data.generator=engine", "engine.speculation_length=2")
    outcome = distill("train", *FAST, *words)
    assert outcome.code == 0, outcome.err
    fresh = read_samples(tmp_path / "run" / "checkpoints" / "step-00000003" / "fresh")
    assert {s.source for s in fresh} == {"draft", "teacher"}


def test_fixed_responses_from_a_file(distill: Any, tmp_path: Path, prompt_file: str) -> None:
    outcome = distill("train", *FAST, "data=fixed", f"data.prompts={prompt_file}", "data.num_prompts=null")
    assert outcome.code == 0, outcome.err
    samples = read_samples(tmp_path / "run" / "data" / "samples")
    assert len(samples) == 10
    assert all(s.signal is not None and s.source == "fixed" for s in samples)
    assert set(summary(tmp_path / "run")["after"]["alpha_by_domain"]) <= {"a", "b"}


def test_mixed_with_the_files_responses(distill: Any, tmp_path: Path, prompt_file: str) -> None:
    words = ("data=mixed", f"data.prompts={prompt_file}", "data.mixed_with=fixed", "data.mixed_lambda=0.5")
    outcome = distill("train", *FAST, *words, "data.refresh_steps=2")
    assert outcome.code == 0, outcome.err
    fresh = read_samples(tmp_path / "run" / "checkpoints" / "step-00000003" / "fresh")
    assert {s.source for s in fresh} == {"draft", "fixed"}


def test_ce_needs_no_teacher_at_all(
    distill: Any, tmp_path: Path, prompt_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("the teacher was asked")

    monkeypatch.setattr("distillspec.training.module.DenseTeacher", forbidden)
    monkeypatch.setattr("distillspec.training.module.SignalTeacher", forbidden)
    monkeypatch.setattr("distillspec.commands.samples.score", forbidden)
    words = ("data=fixed", "data.signal=none", "loss=ce", f"data.prompts={prompt_file}")
    outcome = distill("train", *FAST, *words)
    assert outcome.code == 0, outcome.err
    lines = steps(tmp_path / "run")
    assert lines[-1]["train/loss"] > 0
    assert "train/alpha" not in lines[-1]


def test_token_selection_against_a_reference(distill: Any, tmp_path: Path, data_folder: Path) -> None:
    cache = f"data.cache={data_folder}"
    assert distill("train", *FAST[:-1], cache, "hydra.run.dir=reference").code == 0
    words = ("loss.select_fraction=0.4", "loss.reference=reference/draft", "draft.layers=1")
    outcome = distill("train", *FAST, cache, *words)
    assert outcome.code == 0, outcome.err
    assert len(steps(tmp_path / "run")) == 3


def test_asked_for_no_signal_the_live_target_judges_cached_text(
    distill: Any, tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache holds a signal at temperature 1, which a loss at another temperature must not be fed."""
    assert all(s.signal is not None for s in read_samples(data_folder / "data" / "samples"))

    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("the stored signal was used")

    monkeypatch.setattr("distillspec.training.module.SignalTeacher", forbidden)
    words = (f"data.cache={data_folder}", "data.signal=none", "loss.temperature=2")
    assert distill("train", *FAST, *words).code == 0


def test_a_cached_signal_gives_the_losses_of_a_live_teacher(distill: Any, tmp_path: Path, data_folder: Path) -> None:
    """Top-64 of 259 tokens leave little out: the first step's loss agrees to a few per cent."""
    cache = f"data.cache={data_folder}"
    losses = []
    for name, extra in (("stored", "data.signal=topk"), ("live", "data.signal=none")):
        assert distill("train", *FAST[:-1], cache, extra, f"hydra.run.dir={name}").code == 0
        losses.append(steps(tmp_path / name)[0]["train/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert losses[0] != losses[1]


@pytest.mark.parametrize("signal", ["topk", "none"])
def test_bfloat16_learns_what_float32_learns(distill: Any, tmp_path: Path, data_folder: Path, signal: str) -> None:
    """From a stored signal and from a live target in bfloat16; weights stay float32 either way."""
    runs = {}
    for dtype in ("float32", "bfloat16"):
        words = (f"train.dtype={dtype}", f"target.dtype={dtype if signal == 'none' else 'float32'}")
        common = (f"data.cache={data_folder}", f"data.signal={signal}", "draft.vocabulary=120", "train.max_steps=6")
        # Bounded by log 2, so that one tolerance suits all steps.
        outcome = distill("train", *FAST[:-1], *common, "loss=jsd", *words, f"hydra.run.dir={dtype}")
        assert outcome.code == 0, outcome.err
        runs[dtype] = tmp_path / dtype
    exact, rough = ([step["train/loss"] for step in steps(run)] for run in runs.values())
    assert rough == pytest.approx(exact, rel=0.02, abs=0.05)  # the first is above 0.5
    assert rough != exact
    assert rough[-1] < rough[0]
    alphas = [summary(run)["after"]["alpha"]["mean"] for run in runs.values()]
    assert alphas[1] == pytest.approx(alphas[0], rel=0.1)
    saved = load_newest(runs["bfloat16"] / "checkpoints")[0].strategy
    kept = [*saved["model"].values(), *(state["exp_avg"] for state in saved["optimizer"].values())]
    assert {tensor.dtype for tensor in kept} == {torch.float32}


@pytest.mark.parametrize("eval_every", [1, 100])
def test_a_run_that_diverges_names_the_learning_rate(
    distill: Any, tmp_path: Path, data_folder: Path, eval_every: int
) -> None:
    """Met by the next evaluation, or by as many bad steps as are borne."""
    words = (
        "train.learning_rate=1e30",
        "train.max_bad_steps=3",
        "train.max_steps=20",
        f"train.eval_every={eval_every}",
    )
    outcome = distill("train", *FAST, f"data.cache={data_folder}", *words)
    assert outcome.code == 1
    said = "the draft cannot be evaluated after step 1 (" if eval_every == 1 else "3 steps in a row were not finite"
    last = outcome.err.strip().splitlines()[-1]
    assert said in last
    assert "lower train.learning_rate=1e+30 and continue with resume=" in last
    assert "Traceback" not in outcome.out + outcome.err


def test_another_targets_cache_is_refused(distill: Any, tmp_path: Path, data_folder: Path) -> None:
    from distillspec.models.tiny import tiny_model, tiny_tokenizer

    tiny_model(264, seed=9).save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    outcome = distill("train", *FAST, f"data.cache={data_folder}", "target.path=other")
    assert outcome.code == 2
    assert "made with another target (weights_hash" in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("mixed_by", ["sequence", "token"])
def test_generate_mixes_as_asked(distill: Any, tmp_path: Path, data_folder: Path, mixed_by: str) -> None:
    assert distill("init-draft", "target=tiny", "draft.layers=2", "hydra.run.dir=made").code == 0
    outcome = distill(
        "generate", "target=tiny", "data=mixed", f"data.mixed_by={mixed_by}", "data.mixed_lambda=0.5",
        "draft.path=made", "data.num_prompts=20", "data.eval_prompts=2", "data.max_new_tokens=12",
        "data.max_prompt_tokens=120", "hydra.run.dir=mixed",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    samples = read_samples(tmp_path / "mixed" / "data" / "samples")
    assert len({s.prompt_id for s in samples}) == len(samples) == 20
    assert {s.source for s in samples} == ({"draft", "teacher"} if mixed_by == "sequence" else {"mixed"})
    assert all(s.signal is not None and len(s.signal) == len(s.response_ids) for s in samples)


def test_layers_chosen_by_acceptance_and_a_small_vocabulary(distill: Any, tmp_path: Path, data_folder: Path) -> None:
    words = ("draft.select=acceptance", "draft.layers=3", "draft.vocabulary=80", f"data.cache={data_folder}")
    outcome = distill("train", *FAST, *words)
    assert outcome.code == 0, outcome.err
    record = json.loads((tmp_path / "run" / "draft" / "distillspec.json").read_text())
    assert len(record["lineage"]["target_layers"]) == 3
    assert record["kept_vocabulary"] == 80
    after = summary(tmp_path / "run")["after"]
    assert after["ceiling"]["mean"] < 1
    assert after["alpha"]["mean"] <= after["ceiling"]["mean"]


def test_wandb_offline_continues_the_same_run(
    distill: Any, tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    words = ("tracker=wandb", "tracker.name=short", f"data.cache={data_folder}", "train.max_steps=1")
    outcome = distill("train", *FAST, *words)
    assert outcome.code == 0, outcome.err
    name = (tmp_path / "run" / "wandb_run_id").read_text().strip()
    outcome = distill("train", "resume=run", "train.max_steps=2")
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "run" / "wandb_run_id").read_text().strip() == name
    offline = [p.name for p in (tmp_path / "run" / "wandb").glob("offline-run-*")]
    assert offline
    assert all(run.endswith(name) for run in offline)
    assert [line["step"] for line in steps(tmp_path / "run")] == [1, 2]


def test_two_runs_with_one_seed_are_one_run(distill: Any, tmp_path: Path) -> None:
    """From the prompts on: sampling, packing and training repeat exactly."""
    heads = []
    for name in ("first", "second"):
        assert distill("train", *FAST[:-1], "data.num_prompts=6", f"hydra.run.dir={name}").code == 0
        heads.append((tmp_path / name / "draft" / "model.safetensors").read_bytes())
        torch.rand(3)
    assert heads[0] == heads[1]


def test_tensorboard_writes_its_events_into_the_run(distill: Any, tmp_path: Path, data_folder: Path) -> None:
    pytest.importorskip("tensorboard")
    outcome = distill("train", *FAST, "tracker=tensorboard", f"data.cache={data_folder}", "train.max_steps=1")
    assert outcome.code == 0, outcome.err
    assert list((tmp_path / "run").rglob("*tfevents*"))


def test_an_evaluation_with_other_settings_does_not_test_on_training_prompts(
    distill: Any, tmp_path: Path, prompt_file: str
) -> None:
    """Of the file's 14 prompts ten were trained on and two chose the checkpoint, whatever is asked for."""
    words = (f"data.prompts={prompt_file}", "data.num_prompts=null", "train.max_steps=1")
    assert distill("train", *FAST, *words).code == 0
    trained = DataFolder(tmp_path / "run" / "data").read_prompts().train
    outcome = distill(
        "eval", "target=tiny", "drafts=[run]", f"data.prompts={prompt_file}", "data.eval_prompts=12",
        "data.max_new_tokens=12", "seed=1", "evaluation.measure_cost=false", "hydra.run.dir=judged",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert "only 2 held-out prompts of data.eval_prompts=12" in outcome.out
    judged = DataFolder(tmp_path / "judged" / "data").read_prompts().held_out
    assert len(trained) == 10
    assert not {p.token_ids for p in judged} & {p.token_ids for p in trained}
    assert summary(tmp_path / "judged")["results"][0]["prompts"] == 2


def test_a_run_says_at_most_how_much_text_and_minutes_would_give(
    distill: Any, tmp_path: Path, data_folder: Path
) -> None:
    outcome = distill("train", *FAST, "train.max_steps=12", "train.eval_every=3", f"data.cache={data_folder}")
    assert outcome.code == 0, outcome.err
    curve = summary(tmp_path / "run")["learning_curve"]
    text = read_samples(DataFolder(data_folder / "data").samples)
    learnt = steps(tmp_path / "run")[-1]["tokens"]
    assert curve["passes"] == learnt / sum(len(sample.response_ids) for sample in text)
    assert curve["line"] in outcome.out
    assert distill("report", "runs=[run]", "hydra.run.dir=reported").code == 0
    page = (tmp_path / "reported" / "report.html").read_text()
    assert f"The text was read {curve['passes']:.1f} times" in page


def test_a_run_that_learns_nothing_says_so_while_it_runs_and_at_the_end(
    distill: Any, tmp_path: Path, data_folder: Path
) -> None:
    words = ("train.max_steps=10", "train.eval_every=2", "train.learning_rate=1e-12")
    outcome = distill("train", *FAST, *words, f"data.cache={data_folder}")
    assert outcome.code == 0, outcome.err
    said = [line for line in outcome.out.splitlines() if "WARNING: nothing learned" in line]
    assert [line.split(":")[0] for line in said] == ["step 4", "WARNING"]  # once, after a fair share, and at the end
    assert summary(tmp_path / "run")["nothing_learned"] == said[1]
