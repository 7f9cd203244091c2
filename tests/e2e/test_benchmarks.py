"""Benchmarks that no machine of ours runs every day still run."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import runpy
import statistics
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from distillspec.config import DraftConfig, TargetConfig
from distillspec.errors import RunError
from distillspec.models import initialise_draft, load_target, save_draft
from distillspec.models.stop_head import StopHead
from distillspec.serving import Engine, EngineSettings, SamplingParams
from distillspec.serving.base.shape import TreeShape

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def on_cpu(minutes: int) -> str:
    """Run the benchmark of GPUs on a CPU. Return what it prints."""
    words = f"--shapes tiny --device cpu --minutes {minutes} --output="
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu.py"), *words.split()],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(900)
def test_the_gpu_benchmark_runs_anywhere_on_a_tiny_shape() -> None:
    shown = on_cpu(minutes=60)  # never reached: nothing may be left out
    sections = "share of bandwidth", "5 tokens / 1 token", "host ms a step", "speed-up over plain decoding"
    for check in (*sections, "ms beside the device"):
        assert check in shown
    (beside,) = [line for line in shown.splitlines() if "ms beside the device" in line]
    assert "0.00" in beside, "a CPU does nothing beside itself"
    assert "left out" not in shown
    passes = [line.split("│")[3:-1] for line in shown.splitlines() if "chains" in line or "trees" in line]
    assert len(passes) == 6, "chains, trees and the attention of both, for one row and eight"
    assert all(float(cell) > 0 for line in passes for cell in line)
    assert not (BENCHMARKS / "results" / ".json").exists()


def test_the_gpu_benchmark_begins_nothing_after_its_time() -> None:
    assert on_cpu(minutes=0).count("left out: no time") == 4


def save_tiny_draft(folder: Path) -> None:
    target = load_target(TargetConfig(path="tiny"))
    save_draft(initialise_draft(DraftConfig(layers=2), target), folder, target)


def tiny_words(folder: Path, count: int) -> str:
    """Write a draft and so many prompts, and return the words that name them and the tiny target."""
    save_tiny_draft(folder / "draft")
    rows = [{"prompt": f"What is {i} plus {i + 1}?"} for i in range(count)]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return f"--target tiny --draft {folder / 'draft'} --prompts {folder / 'sums.jsonl'}"


@pytest.fixture
def load_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What benchmarks under load need on the tiny target; their results go to `tmp_path`."""
    save_tiny_draft(tmp_path / "draft")
    rows = [{"prompt": f"Why is {thing} what it is?", "domain": "chat"} for thing in ("water", "fire", "earth", "air")]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    words = f"--target tiny --draft {tmp_path / 'draft'} --prompts {tmp_path / 'chat.jsonl'} --output {tmp_path}"
    return f"{words} --slots 2 --max-tokens 8 --longest-prompt 120 --seconds 0.5"


def run(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *words.split()])
    runpy.run_path(str(BENCHMARKS / name), run_name="__main__")


def test_the_fidelity_benchmark_simulates_the_load_that_it_ran(
    load_words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = "--speculation-length 2 --loads 0.3 --profile-rounds 3 --policies none fixed-2 goodput --own-time"
    run("fidelity.py", f"{load_words} {small}", monkeypatch)
    result = json.loads((tmp_path / "fidelity.json").read_text())
    plain, drafted, _ = result["runs"]
    assert plain["requests"] == drafted["requests"] > 0
    for cell in result["runs"]:
        assert 0.1 < cell["ratio"] < 10
        assert cell["live"].keys() >= {"tokens", "with prompts"}
    # The same acceptance and fixed lengths: the same tokens drafted, whatever the steps took.
    assert drafted["live"]["tokens"] == drafted["simulated"]["tokens"]
    assert "speculating" in drafted["simulated"]
    kinds = [
        (cell["live"][kind], cell["simulated"][kind])
        for cell in result["runs"]
        for kind in ("plain", "speculating", "with prompts")
        if kind in cell["live"] and kind in cell["simulated"]
    ]
    took = [[sum(parts[f"{part}_ms"] for part in ("draft", "target", "rest")) for parts in both] for both in kinds]
    errors, goal = result["step_time_error"], result["goals"]["step_time_error"]
    simulated = statistics.median(abs(simulated_ms / live_ms - 1) for live_ms, simulated_ms in took)
    assert errors["simulated"] == {f"{plain['rate']:.3f}": pytest.approx(simulated), "all": pytest.approx(simulated)}
    assert errors["live"].keys() == errors["simulated"].keys()
    for side, by_load in errors.items():
        assert result["met"][f"step_time_error, {side}"] == (max(by_load.values()) <= goal)
    for picture in ("fidelity.png", "fidelity_profile.png"):
        assert (tmp_path / picture).read_bytes()[:4] == b"\x89PNG"


def test_the_goodput_benchmark_judges_every_load(
    load_words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("goodput.py", f"{load_words} --fixed 1 2 --loads 0.3 --rounds 1 --sections sweep", monkeypatch)
    result = json.loads((tmp_path / "goodput_sweep.json").read_text())
    assert result["loads"]["0.3"]["goodput_against"].keys() == {"none", "fixed-1", "fixed-2"}
    assert result["against_best_fixed"] == min(result["over_all_loads"].values()) > 0
    assert (tmp_path / "goodput_sweep.png").read_bytes()[:4] == b"\x89PNG"


def test_a_weak_draft_is_compared_in_fresh_engines_from_their_first_answers_on(
    load_words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weak_draft = importlib.import_module("weak_draft")
    monkeypatch.setattr(weak_draft, "TOKENS", 12)
    monkeypatch.setattr(weak_draft, "NEAR", 1.0)  # the first strength of noise is taken
    run("goodput.py", f"{load_words} --engines 2 --sections weak", monkeypatch)
    result = json.loads((tmp_path / "goodput_weak.json").read_text())
    assert result["draft"]["noise"] == 0.5
    sides = {"none", "fixed-1", "goodput", "default", "default, nothing drafted"}
    assert [{name: len(answers) for name, answers in rates.items()} for rates in result["rates"]] == [
        dict.fromkeys(sides, 4)
    ] * 2
    for name, plain in (("fixed-1", "none"), ("goodput", "none"), ("default", "default, nothing drafted")):
        firsts = [rates[name][0] / rates[plain][0] for rates in result["rates"]]
        assert result["over_none"][name]["first"]["mean"] == pytest.approx(sum(firsts) / 2)
    for name, met in result["met"].items():
        for which, is_met in met.items():
            over = result["over_none"][name][which]
            assert is_met == (over["mean"] >= result["goals"]["mean"] and over["low"] >= result["goals"]["low"])


def test_noise_is_added_until_a_draft_accepts_as_little_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    weak_draft = importlib.import_module("weak_draft")
    monkeypatch.setattr(weak_draft, "noisy", lambda path, target, noise: noise)
    monkeypatch.setattr(weak_draft, "acceptance", lambda options, target, noise, texts: 0.6 * (1 - noise) ** 2)
    noise, alpha = weak_draft.noise_for(argparse.Namespace(draft="", alpha=0.3), None, [])
    assert alpha == 0.6 * (1 - noise) ** 2 == pytest.approx(0.3, abs=weak_draft.NEAR)
    with pytest.raises(SystemExit, match=r"accepts 0.600 without noise"):
        weak_draft.noise_for(argparse.Namespace(draft="", alpha=0.7), None, [])


def test_the_acceptance_benchmark_reads_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three seconds of the preset on the tiny target."""
    rows = [{"prompt": f"What is {i} plus {i + 1}?"} for i in range(20)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    written: dict[str, Any] = {}
    monkeypatch.setattr("common.write_result", written.__setitem__)
    small = "target=tiny draft.layers=2 draft.vocabulary=128 data.eval_prompts=4 data.max_new_tokens=16"
    short = "evaluation.bootstrap_samples=10 evaluation.cost_batches=[1] train.row_tokens=256 train.batch_tokens=256"
    words = f"--prompts {tmp_path / 'sums.jsonl'} --minutes 0.05 --work {tmp_path / 'work'} {small} {short}"
    with pytest.raises(SystemExit) as end:
        run("acceptance.py", words, monkeypatch)
    assert end.value.code == 0
    result = written["acceptance_0.05min"]
    assert result["draft"] == {"layers": 2, "vocabulary": 128, "overrides": [*small.split(), *short.split()]}
    assert result["generated"]["samples"] == 16
    assert 16 <= result["generated"]["response_tokens"] <= 16 * 16
    assert 0 < result["alpha"]["mean"] < 1


def test_rows_decode_in_every_step_beside_prompts_that_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sums.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i} plus {i + 1}?"}) for i in range(20)))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    contexts = importlib.import_module("contexts")
    monkeypatch.setattr(contexts, "SEGMENTS", 2)
    monkeypatch.setattr(contexts, "SEGMENT_S", 0.3)
    # Thirty steps a segment, in which a prompt is read four tokens at a time, however long they really take.
    monkeypatch.setattr(contexts, "time", SimpleNamespace(perf_counter=count(0, 0.01).__next__))
    target = load_target(TargetConfig(path="tiny"))
    options = argparse.Namespace(prompts=str(tmp_path / "sums.jsonl"), compile=False)
    result = contexts.arrivals(options, target)
    for pace in ("whole", "paced"):
        assert result[pace]["arrived"] > 0
        assert min(result[pace]["steps"].values()) > 1
    monkeypatch.setattr(contexts, "ANSWER", 3)
    with pytest.raises(RunError, match="of 8 rows decoded"):
        contexts.arrivals(options, target)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Results by name, in place of files. Decisions have no 64 MB read before them: nobody quotes their times here."""
    result: dict[str, Any] = {}
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr("decisions.WEIGHTS", numpy.ones(8))
    monkeypatch.setattr("common.write_result", result.__setitem__)
    return result


def test_the_controllers_benchmark_times_chains_trees_and_named_nodes(
    written: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run("controller.py", "--steps 64 --rows 1 3", monkeypatch)
    result = written["controller"]
    assert result["costs"].keys() == {"invented", "measured"}
    for sides in result["costs"].values():
        assert sides.keys() >= {"goodput-chains", "goodput", "goodput beside n-grams"}
        for timing in (timing for by_rows in sides.values() for timing in by_rows.values()):
            assert 0 < timing["total_us"] == pytest.approx(timing["share"] * timing["step_us"], rel=0.02)
    assert result["met"]["us"].keys() == {"1"}, "64 rows were not timed"
    assert result["met"]["share"]["measured"].keys() >= {"goodput", "goodput beside n-grams"}


def test_a_tenants_n_grams_know_its_own_answers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    sides = importlib.import_module("sides")
    settings = {"proposer": "ngram", "speculation_length": 3}
    engine = sides.make_engine(
        argparse.Namespace(compile=False), load_target(TargetConfig(path="tiny")), None, 1, **settings
    )
    asked = [list(range(40, 60))], sides.greedy(40)
    first, again, other = (sides.answers(engine, *asked, tenant)[0].stats.accepted for tenant in ("a", "a", "b"))
    engine.close()
    assert again > first == other


def test_no_side_of_the_speculation_benchmark_answers_for_another_ones_tenant(
    load_words: str, tmp_path: Path, written: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the n-grams of one side would know the answers that another one has written."""
    sides, controllers = importlib.import_module("sides"), dict[tuple[Any, str], set[int]]()

    def noted(engine: Any, texts: Any, params: Any, tenant: str = "default") -> Any:
        controllers.setdefault((engine, tenant), set()).add(id(engine.controller))
        return answers(engine, texts, params, tenant)

    answers = sides.answers
    monkeypatch.setattr(sides, "answers", noted)
    monkeypatch.setattr(sides, "NEW_TOKENS", 8)
    words = f"--target tiny --draft {tmp_path / 'draft'} --prompts {tmp_path / 'chat.jsonl'} --rounds 1 --batches 1"
    run("engine.py", f"{words} --sections speculation", monkeypatch)
    assert len(controllers) == len(written["engine_speculation"]["batch"]["1"]["sides"]) == 8
    assert all(len(used) == 1 for used in controllers.values())


def test_parts_of_steps_are_timed_at_a_fixed_length_and_by_goodput(
    load_words: str, tmp_path: Path, written: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"--target tiny --draft {tmp_path / 'draft'} --prompts {tmp_path / 'chat.jsonl'} --rounds 1 --batches 1 2"
    run("engine.py", f"{words} --sections steps", monkeypatch)
    result = written["engine_steps"]
    assert result["batch"].keys() == {"1", "2"}
    for sides in result["batch"].values():
        assert sides.keys() == {"fixed", "goodput"}
        for timed in sides["fixed"].values():
            assert timed["drafted_tokens"] == result["speculation_length"]
        for timed in (timed for kinds in sides.values() for timed in kinds.values()):
            ms = timed["median_ms"]
            assert 0 < ms["lengths"] < ms["own work"] < ms["step"]
    assert result["met"].keys() == {"1"}, "there are no goals for two rows"
    for side, met in result["met"]["1"].items():
        spent = {kind: timed["median_ms"]["own work"] for kind, timed in result["batch"]["1"][side].items()}
        assert met == {kind: ms <= result["goals_ms"]["1"][kind] for kind, ms in spent.items()}


@pytest.mark.parametrize("trees", ["", " --trees"])
def test_the_selections_benchmark_tells_their_share_of_a_step(
    written: dict[str, Any], monkeypatch: pytest.MonkeyPatch, trees: str
) -> None:
    with pytest.raises(SystemExit) as end:
        run("selection.py", f"--steps 64 --rows 1 3{trees}", monkeypatch)
    result = written["selection_trees" if trees else "selection"]
    tables = {"invented": importlib.import_module("selection").INVENTED}
    tables["measured"] = importlib.import_module("decisions").measured_costs(None)[1]
    assert result["trees"] is bool(trees)
    assert end.value.code == (0 if all(all(met.values()) for met in result["met"].values()) else 1)
    assert result["costs"].keys() == {"invented", "measured"}
    assert result["goals"].keys() == result["met"].keys() == {"goodput", "lbss"}
    for costs, by_rows in result["costs"].items():
        assert by_rows.keys() == {"1", "3"}
        for rows, sides in by_rows.items():
            target_us = 1e6 * tables[costs].target_s([1] * int(rows), [0] * int(rows))
            for name in ("goodput", "lbss", "epsilon_greedy", "random"):
                timing = sides[name]
                assert timing["added_us"] == pytest.approx(timing["us"] - sides["none"]["us"])
                assert timing["share_of_step"] == pytest.approx(timing["added_us"] / timing["step_us"])
                assert timing["step_us"] > target_us, "the target's pass alone takes as long"
        for name, goal in result["goals"].items():
            assert result["met"][name][costs] == (by_rows["3"][name]["share_of_step"] <= goal)


def test_the_trees_benchmark_compares_named_shapes_on_several_files(
    written: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_draft(tmp_path / "draft")
    for name in ("maths", "chat"):
        rows = [{"prompt": f"{name}: what is {i} plus {i + 1}?"} for i in range(16)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr("turns.TOKENS", 80)
    monkeypatch.setattr("turns.TURN", 3)
    monkeypatch.setattr("turns.ALIKE", 1)
    files = ",".join(str(tmp_path / f"{name}.jsonl") for name in ("maths", "chat"))
    sides = "--chains none fixed-1 --shapes topk-2-1 dynamic-3 fork-2x2"
    words = f"--prompts {files} --target tiny --draft {tmp_path / 'draft'} --rounds 4 --batches 1 2 {sides}"
    run("trees.py", words, monkeypatch)
    result = written["trees"]
    assert result["files"].keys() == {"maths", "chat"}
    for batches in result["files"].values():
        batch_1, batch_2 = batches["1"], batches["2"]
        assert batch_1["met"].keys() == {"tuned_chain", "no_draft", "best_shape"}
        assert batch_2["met"].keys() == {"best_shape"}
        for figures in (batch_1, batch_2):
            assert {len(rates) for rates in (figures["rounds"] | figures["choosing"]["rounds"]).values()} == {2}
            assert figures["choosing"]["tokens_per_s"].keys() >= {"no draft", "topk-2-1", "dynamic-3", "fork-2x2"}
            compared = {"no draft", "goodput", "goodput-chains", figures["tuned_chain"], figures["best_tree"]}
            assert figures["tokens_per_s"].keys() == compared
            assert figures["best_shape"] in (figures["tuned_chain"], figures["best_tree"])
            goal, over = result["goals"]["best_shape"]["1"], figures["trees_over_best_shape"]
            assert figures["met"]["best_shape"] == (over["mean"] >= goal["mean"] and over["low"] >= goal["low"])


def test_the_proposers_benchmark_counts_the_drafts_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    proposers = importlib.import_module("proposers")
    target = load_target(TargetConfig(path="tiny"))
    settings = EngineSettings(max_slots=1, controller="fixed", tree="off", speculation_length=3, compile=False)
    engine = Engine(target, initialise_draft(DraftConfig(layers=2), target), settings)
    params = SamplingParams(temperature=0.0, max_tokens=13, ignore_eos=True)
    alone = proposers.answered(engine, [[[5, 6, 7]], [[7, 6, 5]]], params)
    engine.close()
    assert (alone.answers, alone.tokens) == (2, 26)
    assert 0 < alone.drafted <= alone.passes, "each drafted token takes a pass"
    staged = alone._replace(passes=alone.passes // 2, drafted=alone.drafted)
    result = proposers.passes_of({"draft": [alone, alone], "staged-ngram": [staged]})
    assert result["draft"]["saved"] == 0
    assert result["staged-ngram"]["saved"] == pytest.approx(0.5, abs=0.05)
    assert result["staged-ngram"]["written_a_pass"] == 26 / staged.passes
    assert result["draft"]["passes_an_answer"] == alone.passes / 2


def test_the_proposers_benchmark_names_the_passes_of_sides_with_a_draft(
    written: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sides.NEW_TOKENS", 4)
    run("proposers.py", f"{tiny_words(tmp_path, 16)} --rounds 4 --sides staged-ngram ngram", monkeypatch)
    result = written["proposers"]["batches"]["1"]
    assert result["draft_passes"].keys() == {"draft", "staged-ngram"}
    assert result["over_draft"].keys() == {"no draft", "staged-ngram", "ngram"}


def test_the_benchmark_of_moves_times_what_is_accepted_and_every_row(
    written: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("moving.py", f"{tiny_words(tmp_path, 2)} --batches 1 2 --steps 4", monkeypatch)
    result = written["moving"]
    assert result["rows"].keys() == result["met"].keys() == {"1", "2"}
    for rows, figures in result["rows"].items():
        assert figures["every_row"]["ms"] > 0
        assert figures["every_row"]["share"] > 0
        assert 0 <= figures["as_accepted"]["rows_a_step"] <= int(rows)


def test_the_traversal_benchmark_times_each_verifier_and_pairs_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    traversal, written = importlib.import_module("traversal"), dict[str, Any]()
    monkeypatch.setattr("turns.TOKENS", 100)
    monkeypatch.setattr("turns.ALIKE", 1)
    small = {"two": TreeShape.full((2, 1)), "chain": TreeShape.full((1, 1))}
    for name, value in {"TOKENS": 8, "SHAPES": small, "write_result": written.__setitem__}.items():
        monkeypatch.setattr(traversal, name, value)
    monkeypatch.setattr(sys, "argv", ["", *tiny_words(tmp_path, 8).split(), "--rounds", "4", "--prompts-each", "2"])
    traversal.main()
    for shape in written["traversal"]["shapes"].values():
        assert shape["verdict_ms"].keys() == {"from the leaves", "by level", "by level, torch"}
        assert min(shape["verdict_ms"].values()) > 0
    speed = written["traversal"]["batch"]["1"]
    assert speed["over_by_level"].keys() == small.keys()
    assert speed["rounds"].keys() == {"two", "two, by level", "chain", "chain, by level"}


@pytest.mark.parametrize("reads", ["probs", "state"])
def test_the_benchmark_of_deciding_tells_what_the_network_reads(reads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    deciding = importlib.import_module("deciding")
    draft = initialise_draft(DraftConfig(layers=2), load_target(TargetConfig(path="tiny")))
    taught = replace(draft, stop_head=StopHead(reads, 64, 8, draft.width))
    assert deciding.network_reads(taught) == reads
    with pytest.raises(SystemExit, match="without a network"):
        deciding.network_reads(draft)


def test_the_benchmark_of_changes_in_a_pool_counts_requests_and_switches(
    load_words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_target(TargetConfig(path="tiny"))
    save_draft(initialise_draft(DraftConfig(layers=1), target), tmp_path / "other", target)
    written: dict[str, Any] = {}
    monkeypatch.setattr("common.write_result", written.__setitem__)
    files = f"--target tiny --drafts {tmp_path / 'draft'},{tmp_path / 'other'} --prompts {tmp_path / 'chat.jsonl'}"
    small = "--times 1 --before 2 --give-up 3 --probe 1 --tokens 90 --batch 2 --context 40 --rounds 2 --longest 256"
    with pytest.raises(SystemExit) as end:
        run("pool_changes.py", f"{files} {small}", monkeypatch)
    result = written["pool_changes"]
    assert end.value.code == (0 if all(result["met"].values()) else 1)
    assert set(result["goals"]) == set(result["met"])
    (once,) = result["times"]
    for name in ("swap", "collapse"):
        assert once[name]["requests"] is None or 0 <= once[name]["requests"] <= 3
        assert once[name]["counts"], "two requests before it are too few to look as if it had been followed"
        assert sum(once[name]["before"].values()) == 2
        assert result[f"{name}_requests"] == [once[name]["requests"]]
    for side in ("fast", "at once"):
        assert result["switches"][side]["steps"] > 0
        assert result["switches"][side]["p99"] >= result["switches"][side]["p50"] > 0
        assert result["switches"][side]["read_bytes"] > 0
    reading = {side: result["switches"][side]["reading"]["steps"] for side in ("fast", "at once")}
    assert reading["fast"] > 0 == reading["at once"]
    assert result["switches"]["usual"]["p50"] == 1.0 <= result["switches"]["usual"]["p99"]


def test_requests_count_only_where_a_change_did_not_look_followed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    changes = importlib.import_module("pool_changes")
    options = argparse.Namespace(before=30, give_up=10)

    def collapse_of_a(*served: str | None) -> dict[str, Any]:
        made = list[str]()
        answers = iter(served)
        result = changes.counted(lambda: next(answers), lambda by: by != "a", lambda: made.append("it"), options)
        assert made == ["it"]
        return dict(result)

    used, other = ["a", "b"] * 15, ["a"] * 15 + ["b"] * 15
    left = collapse_of_a(*used, "a", "b", "b", "a", "b", None, "b", None, "b")
    assert left == {"before": {"a": 15, "b": 15}, "requests": 4, "counts": True}
    assert collapse_of_a(*other, *"bbbbb") == {"before": {"a": 15, "b": 15}, "requests": 0, "counts": False}
    assert collapse_of_a(*used, *"a" * 15)["requests"] is None


def test_training_of_eagle_is_timed_from_each_source_and_its_memory_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    written: dict[str, Any] = {}
    monkeypatch.setattr("common.write_result", written.__setitem__)
    small = "--target tiny --vocabulary 128 --seconds 0.2 --samples 4 --repeats 1 --dtype float32"
    run("training_eagle.py", small, monkeypatch)
    result = written["training_eagle"]
    assert set(result["response_tokens_per_s"]) == {
        "recorded",
        "recorded, every chain",
        "live teacher",
        "live teacher and states",
    }
    assert all(side["median"] > 0 for side in result["response_tokens_per_s"].values())
    assert len(result["added_bytes"]) == 3
    assert all(peak > 0 for peaks in result["added_bytes"].values() for peak in peaks)
