"""Training the target with its heads (`draft.train_target=true`): another target, and what goes with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from distillspec.config import TargetConfig
from distillspec.models import LanguageModel, load_target, read_metadata
from distillspec.serving import Engine, SamplingParams

from .test_train_runs import FAST, steps, summary
from .test_train_state_drafts import STEADY

KINDS = {"medusa": (), "hydra": ("draft.sequential=true",)}
JOINT = ("draft=medusa", "draft.train_target=true", "draft.positions=3", "draft.layers=null", "train.target_rate=0.2")


@pytest.fixture(params=KINDS)
def words(request: pytest.FixtureRequest, data_folder: Path) -> tuple[str, ...]:
    return (*FAST, *JOINT, *KINDS[request.param], f"data.cache={data_folder}")


def open_target(path: str, dtype: str = "float32") -> LanguageModel:
    return load_target(TargetConfig(path=path, dtype=dtype, device="cpu"))


def test_a_resumed_run_ends_bit_for_bit_the_same(distill: Any, tmp_path: Path, words: tuple[str, ...]) -> None:
    steady = (*words, *STEADY, "train.target_warmup=0")
    whole = distill("train", *steady, "train.max_steps=6", "hydra.run.dir=whole")
    assert whole.code == 0, whole.err
    assert distill("train", *steady).code == 0
    resumed = distill("train", "resume=run", "train.max_steps=6")
    assert resumed.code == 0, resumed.err
    for name in ("draft", "target"):
        ours, theirs = (tmp_path / run / name / "model.safetensors" for run in ("run", "whole"))
        assert ours.read_bytes() == theirs.read_bytes()
    assert len(steps(tmp_path / "run")) == 6
    changes = [summary(tmp_path / run)["target_change"] for run in ("run", "whole")]
    assert changes[0].pop("line") != changes[1].pop("line"), "they name their folders"
    assert changes[0] == changes[1]


def test_it_writes_another_target_and_says_how_far_it_moved(
    distill: Any, tmp_path: Path, words: tuple[str, ...]
) -> None:
    trained = distill("train", *words, "train.max_steps=6")
    assert trained.code == 0, trained.err
    (line,) = [line for line in trained.out.splitlines() if "the target trained too" in line]
    change, place = summary(tmp_path / "run")["target_change"], summary(tmp_path / "run")["target"]
    assert line == change["line"]
    assert line.endswith(f"target.path={place}")
    assert f"KL {change['kl']:.4f}" in line
    assert 0 < change["kl"] < 1
    assert 0.5 < change["agreement"] <= 1
    assert change["new_nll"] != change["old_nll"]
    logged = steps(tmp_path / "run")
    assert logged[0]["train/target_kl"] == pytest.approx(0, abs=1e-4), "the heads warm up alone"
    assert all(0 < step[name] < 1 for step in logged for name in ("train/alpha", "train/alpha_2", "train/alpha_3"))

    old, new = open_target("tiny"), open_target(str(tmp_path / "run" / "target"))
    recorded = read_metadata(tmp_path / "run" / "draft")["target"]
    assert recorded["weights_hash"] == new.identity.weights_hash != old.identity.weights_hash
    assert torch.equal(old.head.weight, new.head.weight), "head and embeddings are shared with the draft"


@pytest.mark.numerics
def test_it_is_served_with_the_new_target(distill: Any, tmp_path: Path, words: tuple[str, ...]) -> None:
    """Greedy output is the new target's own, whatever the draft proposes."""
    assert distill("train", *words, "train.target_warmup=0").code == 0
    place, prompts = str(tmp_path / "run" / "target"), [(1, 20, 30), (1, 40, 50, 60)]
    room: Any = {"compile": False, "max_slots": 2, "max_model_len": 64, "controller": "fixed", "speculation_length": 3}
    engine = Engine.from_pretrained(place, tmp_path / "run", dtype="float64", **room)
    answers = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
    engine.close()
    target = open_target(place, "float64")
    for prompt, answer in zip(prompts, answers, strict=True):
        text = list(prompt)
        for _ in range(16):
            text.append(int(target.logits(torch.tensor([text]))[0, -1].argmax()))
        assert list(answer.token_ids) == text[len(prompt) :]


def test_the_draft_goes_with_the_new_target_alone(distill: Any, tmp_path: Path, data_folder: Path) -> None:
    words = (*FAST, *JOINT, f"data.cache={data_folder}")
    assert distill("train", *words).code == 0
    quick = ("target.dtype=float32", "evaluation.measure_cost=false", "evaluation.bootstrap_samples=10")
    judged = distill("eval", "drafts=[run]", "target.path=run/target", *quick, "hydra.run.dir=judged")
    assert judged.code == 0, judged.err
    (result,) = json.loads((tmp_path / "judged" / "summary.json").read_text())["results"]
    assert result["alpha"]["mean"] == pytest.approx(summary(tmp_path / "run")["after"]["alpha"]["mean"])
    for command in (("eval", "drafts=[run]"), ("serve", "draft.path=run", "server.port=0")):
        refused = distill(*command, "target=tiny", "hydra.run.dir=refused")
        assert refused.code == 2
        assert refused.err.count("\n") == 1
        assert "run/target, whose weights differ from tiny's" in refused.err
