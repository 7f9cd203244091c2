"""`distill bench` from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distillspec.config import DraftConfig, TargetConfig
from distillspec.models import initialise_draft, load_target, save_draft

WORDS = ["target=tiny", "engine.compile=false", "engine.max_slots=2", "engine.max_model_len=128"]
WORDS += ["engine.measure_costs_s=0", "hydra.run.dir=run"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [{"id": str(i), "domain": ("code", "chat")[i % 2], "prompt": f"say {i} again"} for i in range(4)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_policy_meets_the_same_requests(distill: Any, tmp_path: Path, prompts: Path) -> None:
    outcome = distill(
        "bench",
        *WORDS,
        f"bench.prompts=[{prompts}]",
        "bench.policies=[none,fixed-2,goodput]",
        "bench.rates=[20,40]",
        "bench.seconds=0.3",
        "bench.max_tokens=8",
        "bench.ignore_eos=true",
        "engine.proposer=prompt_lookup",
        "sampling.temperature=0",
    )
    assert outcome.code == 0, outcome.err
    assert outcome.out.rstrip().endswith("results: run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    requests = json.loads((tmp_path / "run/requests.json").read_text())
    sent = {
        (rate, policy): [(r["id"], r["arrived_s"], r["domain"], r["output_tokens"]) for r in requests_of]
        for rate in (20.0, 40.0)
        for policy in ("none", "fixed-2", "goodput")
        for requests_of in [sorted((r for r in requests if (r["rate"], r["policy"]) == (rate, policy)), key=_id)]
    }
    for rate in (20.0, 40.0):
        assert sent[rate, "none"] == sent[rate, "fixed-2"] == sent[rate, "goodput"] != []
        for policy in ("none", "fixed-2", "goodput"):
            figures = summary["policies"][policy][str(rate)]
            assert figures["requests"] == len(sent[rate, policy])
            assert figures["failed"] == 0
            assert figures["output_tokens"] == 8 * figures["requests"]
        assert set(summary["times_faster_than_none"][str(rate)]) == {"fixed-2", "goodput"}
    assert (tmp_path / "run/load.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name the prompts to send"),
        (["bench.prompts=[nowhere.jsonl]"], "nowhere.jsonl: no such file"),
        (["bench.prompts=[PROMPTS]", "bench.policies=[none,fast]"], "policy fast is not known; use one of none"),
        (["bench.prompts=[PROMPTS]", "bench.policies=[fixed-9]"], "policy fixed-9 drafts more than"),
        (["bench.prompts=[PROMPTS]", "bench.policies=[smartspec]"], "policy smartspec needs costs"),
        (["bench.prompts=[PROMPTS]", "bench.policies=[none,none]"], "names one twice"),
        (["bench.prompts=[PROMPTS]", "bench.rates=[0]"], "bench.rates=[0.0] must name rates above 0"),
        (["bench.prompts=[PROMPTS]", "bench.longest_prompt=1"], "has no prompt of at most 1 tokens"),
        (["bench.prompts=[PROMPTS]", "model=x"], "model=x is for url="),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    distill: Any, tmp_path: Path, prompts: Path, words: list[str], message: str
) -> None:
    outcome = distill("bench", *WORDS, *(word.replace("PROMPTS", str(prompts)) for word in words))
    assert outcome.code == 2, outcome
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [prompts]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["url=ftp://127.0.0.1:1"], "url=ftp://127.0.0.1:1 is no server's address"),
        (["url=127.0.0.1:8000"], "give it as http://HOST:PORT"),
        (["url=http://127.0.0.1:99999"], "http://127.0.0.1:99999 is no server's address"),
        (["url=http://me:secret@127.0.0.1:1"], "keys come from key_env"),
        (["url=http://127.0.0.1:1/?key"], "drop ?"),
        (["url=[http://127.0.0.1:1,http://127.0.0.1:1/v1]"], "names http://127.0.0.1:1/v1 twice"),
        (["url=http://127.0.0.1:1", "key_env=[A,B]"], "one for each of 1 servers"),
        (["url=http://127.0.0.1:1", "engine.max_slots=2"], "engine.max_slots=2 has no effect with url="),
        (["url=http://127.0.0.1:1", "bench.policies=[none]"], "bench.policies=[none] has no effect with url="),
        (["url=http://127.0.0.1:1", "drafts=[A,B]"], "drafts=[A,B] has no effect with url="),
        (["url=http://127.0.0.1:1", "bench.selections=[lbss]"], "bench.selections=[lbss] has no effect with url="),
        (["url=http://127.0.0.1:1", "+engine.proposer_options.x=1"], "engine.proposer_options.x=1 has no effect with"),
        (["url=http://127.0.0.1:1", "bench.timeout_s=0"], "bench.timeout_s=0.0 must be above 0"),
        (["url=http://127.0.0.1:1"], "cannot connect"),
    ],
)
def test_mistaken_addresses_are_one_line_and_leave_nothing(
    distill: Any, tmp_path: Path, prompts: Path, words: list[str], message: str
) -> None:
    outcome = distill("bench", f"bench.prompts=[{prompts}]", "hydra.run.dir=run", *words)
    assert outcome.code == 2, outcome
    assert message in outcome.err
    assert "secret" not in outcome.err
    assert outcome.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [prompts]


def _id(request: dict[str, Any]) -> int:
    return int(request["id"].removeprefix("load-"))


def test_selections_are_compared_on_one_pool(
    distill: Any, tmp_path: Path, prompts: Path, two_drafts: list[Path]
) -> None:
    words = [*WORDS, f"bench.prompts=[{prompts}]", "bench.rates=[20]", "bench.seconds=0.3", "bench.max_tokens=8"]
    drafts = f"drafts=[{','.join(map(str, two_drafts))}]"
    outcome = distill("bench", *words, drafts, "bench.policies=[none,fixed-2]", "bench.selections=[goodput,lbss,b]")
    assert outcome.code == 0, outcome.err
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert set(summary["policies"]) == {"none", "fixed-2 goodput", "fixed-2 lbss", "fixed-2 b"}
    for mistake, told in {
        "bench.selections=[best]": "selections: best is no selection and no draft; use some of goodput, lbss",
        "draft.path=x": "draft.path=x names one draft and drafts= several",
    }.items():
        failed = distill("bench", *words, "hydra.run.dir=other", drafts, mistake)
        assert (failed.code, told in failed.err) == (2, True), failed.err
    alone = distill("bench", *words, "hydra.run.dir=other", "bench.selections=[lbss]")
    assert (alone.code, "name them in drafts=[A,B]" in alone.err) == (2, True), alone.err
    assert not (tmp_path / "other").exists()


def test_drafts_in_one_tree_are_compared_with_each_alone(
    distill: Any, tmp_path: Path, prompts: Path, two_drafts: list[Path]
) -> None:
    words = [*WORDS, f"bench.prompts=[{prompts}]", "bench.rates=[20]", "bench.seconds=0.3", "bench.max_tokens=8"]
    words.append(f"drafts=[{','.join(map(str, two_drafts))}]")
    named = ["engine.proposer=[b,a]", "bench.policies=[fixed-2]", "sampling.temperature=0"]
    outcome = distill("bench", *words, *named, "bench.selections=[joined,b]")
    assert outcome.code == 0, outcome.err
    sides = json.loads((tmp_path / "run/summary.json").read_text())["policies"]
    sources = {name: set(own["20.0"]["accepted_by_source"]) for name, own in sides.items()}
    assert sources == {"fixed-2 joined": {"a", "b"}, "fixed-2 b": {"b"}}
    assert "20 requests/s, fixed-2 joined: accepted tokens of " in outcome.out
    mistakes = ["hydra.run.dir=other", "engine.proposer=[b,a]", "bench.policies=[goodput]", "bench.selections=[joined]"]
    failed = distill("bench", *words, *mistakes)
    assert (failed.code, "policy goodput: several drafts in one tree need a fixed shape" in failed.err) == (2, True)
    assert not (tmp_path / "other").exists()


@pytest.fixture
def two_drafts(tmp_path: Path) -> list[Path]:
    target = load_target(TargetConfig(path="tiny", dtype="float32", device="cpu"))
    for layers, name in ((1, "a"), (2, "b")):
        save_draft(initialise_draft(DraftConfig(layers=layers), target), tmp_path / name, target)
    return [tmp_path / "a", tmp_path / "b"]


def test_trees_are_compared_by_name(distill: Any, tmp_path: Path, prompts: Path, two_drafts: list[Path]) -> None:
    words = [*WORDS, f"bench.prompts=[{prompts}]", "bench.rates=[20]", "bench.seconds=0.3", "bench.max_tokens=8"]
    draft, names = f"draft.path={two_drafts[0]}", ["none", "topk-2-1", "dynamic-3", "fork-2x2", "siblings-2"]
    outcome = distill("bench", *words, draft, f"bench.policies=[{','.join(names)}]", "bench.rounds=2")
    assert outcome.code == 0, outcome.err
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert set(summary["policies"]) == set(names)
    for mistake, told in {
        "bench.policies=[medusa-4]": "policy medusa-4: tree=medusa needs a draft of kind medusa, not pruned",
        "bench.policies=[topk-5-5]": "policy topk-5-5: tree=topk with widths=[5, 5] has 30 tokens, above nodes=8",
        "bench.policies=[fork-2x9]": "policy fork-2x9: tree=fork with widths=[2] has 18 tokens, above nodes=8",
        "bench.policies=[tree-2-2-1]": "policy tree-2-2-1 has 10 tokens, above engine.nodes=8; raise that",
        "bench.policies=[siblings-3-3-3]": "policy siblings-3-3-3 has 9 tokens, above engine.nodes=8; raise that",
        "bench.policies=[fork-1x6]": "policy fork-1x6 drafts more than engine.speculation_length=4",
    }.items():
        failed = distill("bench", *words, "hydra.run.dir=other", draft, "engine.nodes=8", mistake)
        assert (failed.code, told in failed.err) == (2, True), failed.err
        assert failed.err.count("\n") == 1
    alone = distill("bench", *words, "hydra.run.dir=other", "bench.policies=[dynamic-3]")
    assert (alone.code, "policy dynamic-3 says how a draft model grows trees" in alone.err) == (2, True), alone.err
    assert not (tmp_path / "other").exists()
