"""Commands from the command line to the files they leave."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from distillspec import __version__

from .conftest import FAST


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
