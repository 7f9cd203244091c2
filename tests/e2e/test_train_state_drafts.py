"""Drafts that read the target's states, through every command: train, resume, eval, bench, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distillspec.models import read_metadata
from distillspec.training.checkpoint import load_newest

from .test_train_runs import FAST, steps, summary

KINDS = {
    "eagle": ("draft=eagle", "draft.layers=null", "draft.vocabulary=100", "train.unroll_from=0"),
    "features": ("draft=pruned", "draft.features=true", "train.unroll_from=0"),
    "block": ("draft=block", "draft.positions=3", "draft.layers=null"),
    "medusa": ("draft=medusa", "draft.positions=3", "draft.layers=null"),
    "hydra": ("draft=medusa", "draft.sequential=true", "draft.positions=3", "draft.layers=null"),
}
# Nothing depends on how long the whole run is.
STEADY = ("train.schedule=constant", "train.warmup_fraction=0", "train.eval_every=3")


@pytest.fixture(params=KINDS)
def words(request: pytest.FixtureRequest, data_folder: Path) -> tuple[str, ...]:
    return (*FAST, *KINDS[request.param], f"data.cache={data_folder}")


def test_a_resumed_run_ends_bit_for_bit_the_same(distill: Any, tmp_path: Path, words: tuple[str, ...]) -> None:
    whole = distill("train", *words, *STEADY, "train.max_steps=6", "hydra.run.dir=whole")
    assert whole.code == 0, whole.err
    assert "the draft reads the target's states" in whole.out
    assert distill("train", *words, *STEADY).code == 0
    resumed = distill("train", "resume=run", "train.max_steps=6")
    assert resumed.code == 0, resumed.err
    ours, theirs = (tmp_path / run / "draft" / "model.safetensors" for run in ("run", "whole"))
    assert ours.read_bytes() == theirs.read_bytes()
    ends = [load_newest(tmp_path / run / "checkpoints")[0].strategy["model"] for run in ("run", "whole")]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())  # in float32
    logged = steps(tmp_path / "run")
    assert len(logged) == 6
    assert all(0 < line[name] < 1 for line in logged for name in ("train/alpha", "train/alpha_2", "train/alpha_3"))
    after = summary(tmp_path / "run")["after"]
    assert len(after["alpha_by_position"]) == len(after["tau"])
    assert after["alpha_by_position"][0] == after["alpha"]
    record = read_metadata(tmp_path / "run" / "draft")
    assert record["embeddings"] == "target"
    assert len(record["evaluation"]["rank_acceptance"]) == (min(3, len(after["tau"])) if "draft=medusa" in words else 0)


def test_it_is_evaluated_with_the_engine(distill: Any, tmp_path: Path, data_folder: Path) -> None:
    assert distill("train", *FAST, *KINDS["eagle"], f"data.cache={data_folder}").code == 0
    measured = distill(
        "eval", "target=tiny", "drafts=[run]", f"data.cache={data_folder}", "evaluation.measure_speedup=true",
        "evaluation.speedup_prompts=2", "evaluation.speedup_tokens=6", "evaluation.cost_batches=[1]",
        "evaluation.speculation_length=2", "hydra.run.dir=judged",
    )  # fmt: skip
    assert measured.code == 0, measured.err
    (result,) = json.loads((tmp_path / "judged" / "summary.json").read_text())["results"]
    assert result["measured"]["tau"] >= 1
    assert len(result["alpha_by_position"]) == 2

    refused = distill("export", "target=tiny", "draft.path=run", "hydra.run.dir=out")
    assert refused.code == 2
    assert "transformers has no such class" in refused.err
    exported = distill("export", "target=tiny", "draft.path=run", "format=vllm", "hydra.run.dir=exported")
    assert exported.code == 0, exported.err
    assert json.loads((tmp_path / "exported" / "export" / "config.json").read_text())[
        "eagle_aux_hidden_state_layer_ids"
    ]


def test_it_learns_from_recorded_hidden_states_as_from_the_live_target(distill: Any, tmp_path: Path) -> None:
    eagle = (*FAST, *KINDS["eagle"], *STEADY, "train.max_steps=6")
    recorded = distill("train", *eagle, "data.signal=hidden", "hydra.run.dir=recorded")
    assert recorded.code == 0, recorded.err
    live = distill("train", *eagle, "data.signal=none", "data.cache=recorded", "hydra.run.dir=live")
    assert live.code == 0, live.err
    ours, theirs = (steps(tmp_path / run) for run in ("recorded", "live"))
    assert [line["train/loss"] for line in ours] == pytest.approx([line["train/loss"] for line in theirs], rel=5e-3)


def test_states_are_recorded_with_the_text_that_is_written_for_it(distill: Any, tmp_path: Path) -> None:
    halved = "data.state_precision=fp8"
    trained = distill("train", *FAST, *KINDS["eagle"], "draft.feature_ids=[1,2]", halved)
    assert trained.code == 0, trained.err
    assert "100% recorded with the text" in trained.out
    shards = [load_file(path) for path in (tmp_path / "run" / "data").rglob("shard-*.safetensors")]
    assert {shard["features"].dtype for shard in shards if "features" in shard} == {torch.float8_e4m3fn}
    record = read_metadata(tmp_path / "run" / "draft")
    assert record["reads"]["precision"] == "fp8"
    assert record["lineage"]["policy"]["source"] == "teacher"
    other = distill("train", *FAST, *KINDS["eagle"], "draft.feature_ids=[2,3]", "data.cache=run", "hydra.run.dir=other")
    assert other.code == 0, other.err
    assert "kept in memory" in other.out
    refused = distill("generate", "target=tiny", "data.state_ids=[7]", "hydra.run.dir=g")
    assert refused.code == 2
    assert "tiny has states 0 to 4, not 7" in refused.err
    assert not (tmp_path / "g").exists(), "refused before any text is written"


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("eagle", ("data=draft", "loss=tvdpp")),
        ("block", ("data=mixed",)),
    ],
)
def test_text_of_its_own_is_resumed_bit_for_bit(
    distill: Any, tmp_path: Path, data_folder: Path, kind: str, source: tuple[str, ...]
) -> None:
    """Stopped between two refreshes."""
    fresh = (*source, f"data.cache={data_folder}", "data.refresh_steps=2", "data.refresh_prompts=4")
    words = (*FAST, *KINDS[kind], *STEADY, *fresh)
    whole = distill("train", *words, "train.max_steps=6", "hydra.run.dir=whole")
    assert whole.code == 0, whole.err
    assert distill("train", *words).code == 0
    resumed = distill("train", "resume=run", "train.max_steps=6")
    assert resumed.code == 0, resumed.err
    ends = [load_newest(tmp_path / run / "checkpoints")[0] for run in ("run", "whole")]
    assert all(torch.equal(value, ends[1].strategy["model"][name]) for name, value in ends[0].strategy["model"].items())
    assert summary(tmp_path / "run")["bad_steps"] == 0
    written = {sample.source for sample in ends[0].fresh_samples or []}
    assert written == ({"draft"} if "data=draft" in source else {"draft", "teacher"})
    if kind == "eagle":
        texts = distill(
            "generate", "target=tiny", "draft.path=run", "data=draft", "data.num_prompts=3", "data.eval_prompts=1",
            "data.max_new_tokens=5", "data.signal=topk", "hydra.run.dir=texts",
        )  # fmt: skip
        assert texts.code == 0, texts.err
