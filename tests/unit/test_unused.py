"""Settings that nothing reads are refused, and those that something reads are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from distillspec import cli
from distillspec.composition import compose
from distillspec.config.unused import check_unused
from distillspec.errors import ConfigError


def check(line: str) -> None:
    command, *words = line.split()
    check_unused(compose(command, words), words)


@pytest.mark.parametrize(
    ("line", "needs"),
    [
        ("train loss=fkl loss.kl=0.5", "loss.kl=0.5 needs loss=jsd_kl"),
        ("train loss=lk loss.beta=.3", "loss.beta=.3 needs loss=jsd or loss=jsd_kl"),
        ("train loss=jsd loss.eta=7", "loss.eta=7 needs loss=lk_hybrid"),
        ("train loss.mix={fkl:1} loss.kl=.5", "loss.kl=.5 needs loss.mix=null"),
        ("train data.signal=none data.tail_draws=9", "data.tail_draws=9 needs data.signal=topk"),
        ("train data.signal=sampled data.tail_draws=9", "data.tail_draws=9 needs data.signal=topk"),
        ("train data.signal=none data.signal_entries=9", "data.signal_entries=9 needs data.signal=topk or"),
        ("train data=fixed data.prompts=f.jsonl data.temperature=.3", "data.temperature=.3 needs data=teacher,"),
        ("generate data=fixed data.prompts=f.jsonl data.top_p=.3", "data.top_p=.3 needs data=teacher,"),
        (
            "train evaluation.measure_cost=false evaluation.cost_batches=[4]",
            r"evaluation.cost_batches=\[4\] needs evaluation.measure_cost=true",
        ),
        ("eval drafts=[d] data.num_prompts=7", "data.num_prompts=7 needs distill train or distill generate"),
        ("eval drafts=[d] data.temperature=.3", "data.temperature=.3 needs distill train or distill generate"),
    ],
)
def test_a_setting_that_nothing_reads_is_refused(line: str, needs: str) -> None:
    with pytest.raises(ConfigError, match=f"{needs}.*; it has no effect here"):
        check(line)


@pytest.mark.parametrize(
    "line",
    [
        "train loss.kl=0.5 loss.beta=.3",
        "train loss=lk_hybrid loss.eta=7",
        "train data.tail_draws=9 evaluation.cost_batches=[4]",
        "train data.signal=sampled data.signal_entries=9",
        "train data.temperature=.3 data.num_prompts=7",
        # The target answers a few training prompts, to choose the vocabulary by.
        "train data=fixed data.prompts=f.jsonl data.signal=none draft.vocabulary=64 data.temperature=.3",
        "init-draft data=fixed data.prompts=f.jsonl draft.vocabulary=64 data.temperature=.3",
        "eval drafts=[d] data.max_new_tokens=9 data.eval_prompts=7 sampling.temperature=.3",
    ],
)
def test_a_setting_with_an_effect_is_taken(line: str) -> None:
    check(line)


def test_a_run_goes_on_with_the_settings_it_was_begun_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- loss=fkl\n- loss.kl=0.5\n")
    monkeypatch.setattr(cli, "run_with_hydra", lambda *args: 0)
    assert cli._run("train", [f"resume={tmp_path}"]) == 0
    with pytest.raises(ConfigError, match=r"loss\.eta=7 needs"):
        cli._run("train", [f"resume={tmp_path}", "loss.eta=7"])
