"""Settings that nothing reads are refused, and those that something reads are not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distillspec import cli
from distillspec.composition import compose
from distillspec.config.unused import check_unused
from distillspec.errors import ConfigError


def refusal(line: str) -> str | None:
    """Return the line that refuses one of the words; None if all have an effect."""
    command, *words = line.split()
    config = compose(command, words)
    try:
        check_unused(config, words)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("line", "needs"),
    [
        (
            "train draft=pretrained draft.path=d draft.layers=2",
            "draft.layers=2 needs draft=pruned or draft=scratch or draft=eagle or draft=block",
        ),
        ("train loss=fkl loss.kl=0.5", "loss.kl=0.5 needs loss=jsd_kl"),
        ("train loss=fkl loss.beta=.5", "loss.beta=.5 needs loss=jsd or loss=jsd_kl"),
        ("train loss=tvd loss.mix={fkl:1}", "loss=tvd needs loss.mix=null"),
        ("train loss.name=tvd loss.mix={fkl:1}", "loss.name=tvd needs loss.mix=null"),
        ("train loss.mix={fkl:1} +loss.params.scale=2", r"\+loss.params.scale=2 needs loss.mix=null"),
        ("train data.refresh_prompts=9", "data.refresh_prompts=9 needs data=draft, data=mixed or data=fixed"),
        ("generate data=draft draft.path=d data.refresh_steps=9", "data.refresh_steps=9 needs distill train"),
        ("train data.split=test", "data.split=test needs data.prompts=FILE"),
        ("train data.prompts=f.jsonl data.response_field=a", "data.response_field=a needs data=fixed, or data=mixed"),
        ("train data=draft data.max_minutes=3", "data.max_minutes=3 needs samples written before training"),
        ("train data.cache=d data.shard_sequences=3", "data.shard_sequences=3 needs samples written before training"),
        (
            "train draft=pruned data.state_precision=fp8",
            r"data.state_precision=fp8 needs data.state_ids=\[…\], or a draft that reads states",
        ),
        (
            "train draft=medusa draft.train_target=true train.feature_gib=1",
            "train.feature_gib=1 needs draft.train_target=false",
        ),
        ("train draft=medusa train.target_weight=2", "train.target_weight=2 needs draft.train_target=true"),
        ("init-draft draft=medusa draft.train_target=true", "draft.train_target=true needs distill train"),
        ("serve loss=tvd", "loss=tvd needs online=on or online=decoupled"),
        ("serve loss.chunk_tokens=9", "loss.chunk_tokens=9 needs online=on or online=decoupled"),
        ("serve tracker=tensorboard", "tracker=tensorboard needs online=on or online=decoupled"),
        ("serve online.folder=f", "online.folder=f needs online=on or online=decoupled"),
        ("serve online=decoupled adapt.max_steps=8", "max_steps=8 needs online=on; with online=decoupled give it to"),
        ("serve online=decoupled loss=tvd", "loss=tvd needs online=on; with online=decoupled give it to distill adapt"),
        (
            "serve online=decoupled adapt.busy_share=.5",
            "adapt.busy_share=.5 needs distill serve online=on, which starts the trainer itself",
        ),
        ("adapt adapt.niceness=3", "adapt.niceness=3 needs distill serve online=on, which starts the trainer itself"),
        ("adapt once=true adapt.busy_share=.5", "adapt.busy_share=.5 needs distill serve online=on"),
        ("versions action=gc online.keep_versions=9", "keep_versions=9 needs distill serve; .* takes keep=N"),
        (
            "serve engine.proposer=prompt_lookup engine.draft_confidence=.3",
            "draft_confidence=.3 needs engine.proposer=draft_model or engine.proposer=lookup_else_model",
        ),
        ("serve engine.selection=lbss", "engine.selection=lbss needs drafts="),
        ("bench bench.prompts=[p] engine.selection=random", "engine.selection=random needs drafts="),
        (
            "serve drafts=[a,b] engine.proposer=[a,b] engine.controller=fixed engine.selection=lbss",
            "engine.selection=lbss needs engine.controller=goodput",
        ),
        ("serve engine.controller=fixed engine.lengths=request", "lengths=request needs engine.controller=goodput"),
        ("adapt adapt.offline=text", "adapt.offline=text needs adapt.offline_share"),
        ("adapt adapt.accepted_weight=.5", "adapt.accepted_weight=.5 needs adapt.positions=weighted"),
        ("adapt adapt.mode=flush adapt.replay_share=.5", "adapt.replay_share=.5 needs adapt.mode=replay"),
        ("adapt once=true max_updates=3", "max_updates=3 needs once=false"),
        ("bench bench.prompts=[p] bench.timeout_s=9", "bench.timeout_s=9 needs url="),
        ("bench bench.prompts=[p] key_env=[A]", r"key_env=\[A\] needs url="),
        ("simulate policies=[goodput-step,smartspec,topk-2] tree=off", r"tree=off needs policies=\[goodput\]"),
        ("simulate policies=[goodput-chains,tree-2] nodes=3", r"nodes=3 needs policies=\[goodput\]"),
        ("simulate workload.trace=f workload.rates=[1]", r"workload.rates=\[1\] needs workload.trace=null"),
        ("replay tenant=acme", "tenant=acme needs action=exclude, include, export or delete"),
        ("versions version=v1", "version=v1 needs action=show or action=promote"),
        ("versions keep=9", "keep=9 needs action=gc"),
        ("versions name=SQL", "name=SQL needs action=rollback or action=withdraw"),
        ("versions action=promote version=V name=SQL", "name=SQL needs action=rollback or action=withdraw"),
        ("train loss=lk loss.beta=.3", "loss.beta=.3 needs loss=jsd or loss=jsd_kl"),
        ("train loss=jsd loss.eta=7", "loss.eta=7 needs loss=lk_hybrid"),
        ("train loss.mix={fkl:1} loss.kl=.5", "loss.kl=.5 needs loss.mix=null"),
        ("train data.signal=none data.tail_draws=9", "data.tail_draws=9 needs data.signal=topk"),
        ("train data.signal=sampled data.tail_draws=9", "data.tail_draws=9 needs data.signal=topk"),
        ("train data.signal=hidden data.signal_entries=9", "data.signal_entries=9 needs data.signal=topk or"),
        ("train data.signal=none data.signal_entries=9", "data.signal_entries=9 needs data.signal=topk or"),
        ("train data=fixed data.prompts=f.jsonl data.temperature=.3", "data.temperature=.3 needs data=teacher,"),
        ("generate data=fixed data.prompts=f.jsonl data.top_p=.3", "data.top_p=.3 needs data=teacher,"),
        (
            "train evaluation.measure_cost=false evaluation.cost_batches=[4]",
            r"evaluation.cost_batches=\[4\] needs evaluation.measure_cost=true",
        ),
        (
            "train data.cache=d data.temperature=.3",
            "data.temperature=.3 needs data.cache=null, or data=draft or data=mixed",
        ),
        ("train data.cache=d data.top_p=.3", "data.top_p=.3 needs data.cache=null, or data=draft or data=mixed"),
        ("train data.cache=d data.signal_entries=9", "data.signal_entries=9 needs data.cache=null, or data=draft or"),
        ("init-draft data.cache=d data.tail_draws=9", "data.tail_draws=9 needs data.cache=null, or data=draft or"),
        ("train train.unroll=2", "train.unroll=2 needs a draft that reads states and drafts token by token"),
        ("train draft=block train.unroll_from=.5", "train.unroll_from=.5 needs a draft that reads states and drafts"),
        (
            "train draft=medusa train.unroll=2",
            "train.unroll=2 needs a draft that reads states and drafts token by token",
        ),
        (
            "train draft=scratch train.unroll_decay=.4",
            "train.unroll_decay=.4 needs a draft that reads the target.s states",
        ),
        ("train train.unroll_weights=[1,1,1]", r"train.unroll_weights=\[1,1,1\] needs a draft that reads the target.s"),
        (
            "train train.feature_gib=1",
            r"feature_gib=1 needs a draft that reads the target.s states, .* data.state_ids=\[…\]",
        ),
        ("eval drafts=[d] data.num_prompts=7", "data.num_prompts=7 needs distill train or distill generate"),
        ("eval drafts=[d] data.temperature=.3", "data.temperature=.3 needs distill train or distill generate"),
    ],
)
def test_a_setting_that_nothing_reads_is_refused(line: str, needs: str) -> None:
    said = refusal(line)
    assert said is not None
    assert re.search(f"{needs}.*; it has no effect here", said)


@pytest.mark.parametrize(
    "line",
    [
        "train loss.kl=0.5 loss.beta=.3",
        "train loss.mix={fkl:1} loss.temperature=1 loss.chunk_tokens=9",
        "train data.refresh_prompts=9 data=fixed data.prompts=f.jsonl",
        "generate data=draft draft.path=d data.max_minutes=3 data.shard_sequences=3",
        "train data=mixed data.prompts=f.jsonl data.mixed_with=fixed data.response_field=a data.split=b",
        "serve loss=tvd online=on online.folder=f tracker=none adapt.niceness=3",
        "serve engine.draft_confidence=.3 engine.lengths=step",
        "serve drafts=[a,b] engine.selection=lbss +engine.selection_options.chunk=8",
        "serve drafts=[a,b] engine.proposer=[a,ngram,b] engine.selection=lbss engine.draft_confidence=.3",
        "serve drafts=[a,b] engine.proposer=[a,b] engine.controller=fixed engine.tree=topk engine.widths=[2]",
        "serve engine.proposer=lookup_else_model engine.draft_confidence=.3 +engine.proposer_options.longest=3",
        "serve online=on adapt.niceness=3 adapt.busy_share=.5",
        "serve online=off adapt.niceness=3",
        "adapt adapt.threads=3 adapt.device=cpu",
        "adapt adapt.positions=weighted adapt.accepted_weight=.5 max_updates=3",
        "generate data=draft draft.path=d data.temperature=.5",
        "bench bench.prompts=[p] url=http://h:1 bench.timeout_s=9 key_env=[A]",
        "replay action=export tenant=acme",
        "versions action=gc keep=9",
        "versions action=rollback name=SQL",
        "versions action=withdraw name=SQL",
        "train loss=lk_hybrid loss.eta=7",
        "train data.tail_draws=9 evaluation.cost_batches=[4]",
        "train data.signal=sampled data.signal_entries=9",
        "train data.temperature=.3 data.num_prompts=7",
        "train draft=medusa draft.train_target=true train.target_rate=.1 train.target_warmup=0 train.target_weight=2",
        "train draft=medusa train.feature_gib=1 data.state_precision=fp8",
        # The target answers a few training prompts, to choose the vocabulary by.
        "train data=fixed data.prompts=f.jsonl data.signal=none draft.vocabulary=64 data.temperature=.3",
        "init-draft data=fixed data.prompts=f.jsonl draft.vocabulary=64 data.temperature=.3",
        "train data=draft data.cache=d data.temperature=.3 data.top_p=.9",
        "train data=mixed data.cache=d data.signal_entries=9 data.tail_draws=2",
        "train data=fixed data.cache=d data.signal=none draft.vocabulary=64 data.temperature=.3",
        "init-draft data.cache=d draft.vocabulary=64 data.temperature=.3",
        "train draft=eagle train.unroll=2 train.unroll_decay=.4 train.unroll_from=.5 train.feature_gib=1",
        "train draft.features=true train.unroll=2 train.feature_gib=1",
        "train draft=pretrained draft.path=d train.unroll=2 train.feature_gib=1",  # it may read states
        "train draft=block train.unroll_decay=.4",
        "train draft=medusa draft.positions=2 train.unroll_weights=[1,.5]",
        "train data.state_ids=[1] train.feature_gib=1",
        "eval drafts=[d] data.max_new_tokens=9 data.eval_prompts=7 sampling.temperature=.3",
    ],
)
def test_a_setting_with_an_effect_is_taken(line: str) -> None:
    assert refusal(line) is None


def test_a_run_goes_on_with_the_settings_it_was_begun_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- loss=fkl\n- loss.kl=0.5\n")
    monkeypatch.setattr(cli, "run_with_hydra", lambda *args: 0)
    assert cli.main(["train", f"resume={tmp_path}"]) == 0
    assert cli.main(["train", f"resume={tmp_path}", "loss.eta=7"]) == 2
    assert "loss.eta=7 needs" in capsys.readouterr().err


def test_settings_of_online_learning_stay_beside_a_typed_online_off() -> None:
    """Service files switch learning off and on with one word."""
    words = ["loss=fkl", "online.folder=f", "replay.share=.5", "adapt.epochs=2", "gate.requests=99", "tracker=wandb"]
    check_unused(compose("serve", [*words, "online=off"]), [*words, "online=off"])
    for word in words:
        with pytest.raises(ConfigError, match=f"{word} needs online=on or online=decoupled"):
            check_unused(compose("serve", [word]), [word])
