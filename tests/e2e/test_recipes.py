"""The recipes as one command each, on the tiny target."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from distillspec.cli import main as distill
from distillspec.config import DraftConfig, TargetConfig
from distillspec.models import initialise_draft, load_target, save_draft
from distillspec.recipes.demo import __main__ as demo
from distillspec.recipes.distillspec import __main__ as study
from distillspec.recipes.distillspec import cells, results
from distillspec.recipes.distillspec.grid import Study
from distillspec.recipes.kinds import __main__ as kinds
from distillspec.recipes.osd import __main__ as osd
from distillspec.recipes.osd import live
from distillspec.recipes.osd.side import Side, Turn
from distillspec.recipes.spin import __main__ as spin
from distillspec.recipes.spin import kept
from distillspec.recipes.spin import simulated as simulated_part
from distillspec.recipes.spin.ablation import parts_table
from distillspec.recipes.spin.live import Live
from distillspec.recipes.spin.regret import Regret
from distillspec.recipes.spin.simulated import Simulated
from distillspec.recipes.spin.switches import Switches
from distillspec.recipes.spin.tables import tables
from distillspec.recipes.trees import __main__ as trees
from distillspec.recipes.trees import room


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [{"prompt": f"What is {i} plus {i + 1}?", "response": f"It is {2 * i + 1}."} for i in range(24)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_kinds_learn_from_the_same_text_and_are_compared(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "draft.vocabulary=128 data.num_prompts=24 data.eval_prompts=8 data.max_new_tokens=12 train.max_steps=3 "
    words += "evaluation.speedup_prompts=2 evaluation.speedup_tokens=6 evaluation.cost_batches=[1] "
    words += "evaluation.speculation_length=4"
    arguments = ["--prompts", str(prompts), "--output", "out", "--target", "tiny", "--kinds", "block,hydra"]
    monkeypatch.setattr(sys, "argv", ["kinds", *arguments, *words.split()])
    assert kinds.main() == 0
    record = json.loads(Path("out/results.json").read_text())["kinds"]
    assert set(record) == {"eagle", "block", "hydra"}
    for each in record.values():
        assert len(each["alpha"]) == len(each["tau"]) == 4
        assert each["bytes"] > 1000
        assert each["measured"]["tau"] >= 1
        assert each["measured_at"]["8"]["prompts"] == 1, "fewer than eight prompts are one group"
    folders = [json.loads(Path(f"out/{kind}/summary.json").read_text()) for kind in record]
    assert len({summary["after"]["positions"] for summary in folders}) == 1, "judged on the same answers"
    assert capsys.readouterr().out.count("100% recorded with the text") == 3, "heads read another state, recorded too"
    assert Path("out/kinds.png").stat().st_size > 1000
    written = Path("out/eagle/summary.json").stat().st_mtime_ns
    capsys.readouterr()
    assert kinds.main() == 0
    assert Path("out/eagle/summary.json").stat().st_mtime_ns == written, "finished runs are kept"
    assert "| block |" in capsys.readouterr().out


def test_trees_are_compared_and_finished_runs_are_kept(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made = {"one": ["draft=pruned", "draft.layers=2"], "other": ["draft=pruned", "draft.layers=1"]}
    for folder, words in {**made, "heads": ["draft=medusa"]}.items():
        assert distill(["init-draft", "target=tiny", *words, f"hydra.run.dir={folder}"]) == 0
    cells = "chain,roots-2,roots-2-draft-2,medusa-16,three-sources,two-drafts"
    chosen = ["--cells", cells, "--further", "other", "--medusa", "heads", "--count", "3"]
    words = ["quality.rounds=1", "quality.max_tokens=8", "engine.compile=false", "engine.max_model_len=256"]
    words.append("engine.measure_costs_s=0")
    files = ["--prompts", str(prompts), "--draft", "one", "--output", "out", "--target", "tiny"]
    monkeypatch.setattr(sys, "argv", ["trees", *files, *chosen, *words])
    assert trees.main() == 0
    record = json.loads(Path("out/results.json").read_text())["cells"]
    assert {name: set(both) for name, both in record.items()} == {
        "chain": {"exact"},
        "roots-2": {"exact", "target_initialised"},
        "roots-2-draft-2": {"exact", "target_initialised"},
        "medusa-16": {"exact", "typical"},
        "three-sources": {"exact"},
        "two-drafts": {"exact"},
    }
    assert set(record["two-drafts"]["exact"]["accepted_by_source"]) <= {"one", "other"}
    assert Path("out/trees.png").stat().st_size > 1000
    written = Path("out/chain/summary.json").stat().st_mtime_ns
    capsys.readouterr()
    assert trees.main() == 0
    assert Path("out/chain/summary.json").stat().st_mtime_ns == written
    assert "| roots-2 | (2, 4, 3, 1, 1), 82 tokens | target_initialised |" in capsys.readouterr().out


def test_the_oracle_writes_the_same_text_in_no_more_steps(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert distill(["init-draft", "target=tiny", "draft=pruned", "draft.layers=2", "hydra.run.dir=draft"]) == 0
    files = ["--prompts", str(prompts), "--draft", "draft", "--output", "out", "--target", "tiny"]
    sizes = ["--batches", "2", "--temperatures", "0.7", "--rounds", "2", "--tokens", "10", "--dtype", "float32"]
    monkeypatch.setattr(sys, "argv", ["room", *files, *sizes])
    assert room.main() == 0
    (cell,) = json.loads(Path("out/room.json").read_text())["cells"]
    for shape in cell["depths"]:
        assert cell["tokens_per_step"][f"{shape}, foreseen"] == cell["tokens_per_step"][shape]
    assert "| tree (4, 2, 2, 1) |" in capsys.readouterr().out


def test_selections_among_drafts_are_compared_live_and_simulated(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for layers, name in ((1, "one"), (2, "two")):
        assert distill(["init-draft", "target=tiny", f"draft.layers={layers}", f"hydra.run.dir={name}"]) == 0
    files = ["--prompts", str(prompts), "--drafts", "one,two", "--output", "out", "--target", "tiny"]
    sizes = ["--batches", "2", "--rounds", "1", "--each", "2", "--tokens", "6", "--rows", "2"]
    sizes += ["--recorded", "16"]
    monkeypatch.setattr(sys, "argv", ["spin", *files, *sizes])
    few: dict[str, Any] = {"machines": ("a100-7b-five",), "requests_a_row": 1, "long_requests": 4, "ablation_rows": 2}
    few |= {"full_rows": 4, "regret": Regret(answers=12, seeds=1), "switches": Switches(runs=1)}
    monkeypatch.setattr(spin, "Simulated", partial(Simulated, **few))
    committed = {"distillspec": "0.1.0", "git_commit": "0123", "git_dirty": False}
    monkeypatch.setattr(kept, "provenance", lambda argv, seed: committed)
    assert spin.main() == 0
    record = json.loads(Path("out/results.json").read_text())
    (batch,) = record["live"]["batches"].values()
    assert {"none", "one", "two+ngram", "ngram", "goodput", "lbss"} <= set(batch["tokens_per_s"])
    assert all(len(rates) == 1 for rates in batch["tokens_per_s"].values())
    assert all(sum(chose["requests"].values()) == 2 for chose in batch["chose"].values())
    assert batch["idle"]["none"]["padding"] == 0
    assert all(len(own["prompts"]) == 1 for own in batch["by_domain"].values())
    assert set(batch["alone"]["prompts"]) == {"none", "one", "two", "goodput", "goodput+ngram", "lookup_else_model"}
    assert all(0 <= share <= 1 for own in batch["idle"].values() for share in own.values())
    simulated = record["simulated"]["machines"]["a100-7b-five"]
    assert {"none", "s68m", "goodput", "oracle"} <= set(simulated["selections"]["2"]["tokens_per_s"])
    assert set(simulated["parts"]) == {"selection", "decomposition", "pipelining", "all"}
    assert set(simulated["selections"]["2"]["by_domain"]["goodput"]) <= {"chat", "code", "maths", "sql", "summaries"}
    for curves in simulated["micro_batches"]["2"]:
        assert 0 <= curves["2"]["target_idle"] < 1
        assert curves["2"]["draft_idle"] <= curves["1"]["draft_idle"] + 0.5
    memory = simulated["memory"]
    assert memory["alone"]["cache_tokens"] > memory["goodput"]["cache_tokens"], "one draft leaves more room"
    for trace in record["simulated"]["regret"].values():
        assert trace["answers"][-1] == 12
        assert set(trace["regret"]) == set(trace["fits"]) == {"lbss", "epsilon_greedy", "goodput"}
        assert trace["oracle_s"] > 0
    assert record["simulated"]["provenance"] == committed
    live = json.loads(Path("out/live.json").read_text())
    assert {"git_commit"} <= set(live["provenance"])
    assert live["settings"]["domains"] == ["prompts"]
    assert live["regret"]["answers"][-1] == live["regret"]["alike"] == 16
    assert set(live["regret"]["tried"]) == {"one", "two"}
    assert 0 <= record["simulated"]["trials"]["lost"] < 1
    assert record["simulated"]["trials"]["over"]["learnt"]["ratio"] > 0
    assert record["simulated"]["switches"]["lbss"]["at_once"]["switching"]["steps"] > 0
    assert Path("out/spin.png").stat().st_size > 1000
    assert Path("out/simulated.png").stat().st_size > 1000
    said = capsys.readouterr().out
    assert "| drafts by |" in said
    assert "| goodput over lookup_else_model |" in said
    assert "Regret on recorded answers" in said
    assert tables(json.loads(Path("out/simulated.json").read_text())) in said, "whatever the order of its keys"
    monkeypatch.setattr(simulated_part, "simulation", None)  # as nothing is simulated again
    assert Simulated((2,), **few).run(Path("out/simulated.json")) == record["simulated"]
    monkeypatch.setattr(sys, "argv", ["spin", *files[:2], "--drafts", "nothing"])
    with pytest.raises(SystemExit):
        spin.main()
    assert "nothing is not a draft" in capsys.readouterr().err


def test_spins_parts_are_compared_live(tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for layers, name in ((1, "one"), (2, "two")):
        assert distill(["init-draft", "target=tiny", f"draft.layers={layers}", f"hydra.run.dir={name}"]) == 0
    small = {"rounds": 1, "each": 2, "alone": 0, "tokens": 6, "selections": (), "parts": True}
    parts = Live("tiny", [prompts], ["one/draft", "two/draft"], [2], **small).run(Path("live.json"))["parts"]
    assert set(parts["tokens_per_s"]) == {"base", "selection", "decomposition", "pipelining", "all", "flat"}
    assert parts["batch"] == 2
    assert parts["best_draft"] in ("one", "two")
    assert json.loads(Path("live.json").read_text())["parts"] == parts
    assert "| decomposition | " in parts_table(parts)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--drafts d", "the live part needs both --prompts and --drafts"),
        ("--prompts p.jsonl", "the live part needs both --prompts and --drafts"),
        ("--prompts p.jsonl --drafts d --each 0", "--each 0 must be at least 1"),
        ("--prompts p.jsonl --drafts d --rounds -1", "--rounds -1 must be at least 1"),
        ("--prompts p.jsonl --drafts d --alone -1", "--alone -1 must be at least 0"),
        (
            "--prompts p.jsonl --drafts d --batches 1 --parts",
            "--parts needs a batch above 1: one row has nothing to pad",
        ),
        ("--prompts p.jsonl --drafts d --recorded 15", "--recorded 15: regret needs 16 answers in all, or 0 for none"),
        ("--jobs 0", "--jobs 0 must be at least 1"),
    ],
)
def test_what_selections_cannot_be_compared_on_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["spin", *words.split()])
    with pytest.raises(SystemExit) as stop:
        spin.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: {problem}\n")
    assert list(tmp_path.iterdir()) == []


def test_the_study_fills_cells_and_goes_on_where_it_stopped(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for module in (cells, results):
        monkeypatch.setattr(module, "LOSSES", ("fkl",))
        monkeypatch.setattr(module, "SOURCES", ("fixed", "draft"))
    amounts = "--tokens 200 --warm-tokens 200 --data-minutes 1"
    arguments = f"--target tiny {amounts} --vocabulary 128 --eval-prompts 4 --max-new-tokens 12"
    monkeypatch.setattr(sys, "argv", ["study", "--prompts", str(prompts), "--output", "out", *arguments.split()])
    assert study.main() == 0
    figures = json.loads(Path("out/results.json").read_text())
    assert set(figures["cells"]) == {"fkl-fixed", "fkl-draft"}
    assert (figures["layers"], figures["vocabulary"]) == (3, 128)
    assert {"git_commit", "git_dirty", "packages"} <= set(figures["provenance"])
    assert all(0 < cell["alpha"]["mean"] <= 1 for cell in figures["cells"].values())
    assert Path("out/heatmap.png").stat().st_size > 1000

    finished = Path("out/cells/fkl-fixed/summary.json").read_text()
    Path("out/cells/fkl-draft/summary.json").unlink()  # as if it had been cut off after its last checkpoint
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--jobs", "2"])
    assert study.main() == 0
    said = capsys.readouterr().out
    assert "fkl on draft: done" in said
    assert "fkl on fixed" not in said
    assert Path("out/cells/fkl-fixed/summary.json").read_text() == finished


def test_a_cell_that_fails_in_its_own_process_stops_the_study_and_names_its_log(
    tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Study(tmp_path / "out", str(prompts), tokens=-1, warm_tokens=100, data_minutes=1.0, target="tiny", jobs=2)
    assert cells.run_cells(broken, lambda: None) == 2
    assert "exit code 2, see" in capsys.readouterr().out
    logs = list((tmp_path / "out/cells").glob("*.log"))
    assert any("train.max_tokens" in log.read_text() for log in logs)


@pytest.mark.long
def test_the_demo_ends_with_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo", "--minutes", "0.1", "--target", "tiny"])
    assert demo.main() == 0
    (page,) = tmp_path.glob("runs/demo/*/report/report.html")
    assert "α" in page.read_text()
    (summary,) = tmp_path.glob("runs/demo/*/summary.json")
    figures = json.loads(summary.read_text())
    assert figures["before"]["measured"] is None  # nobody serves it: measuring it would only take minutes
    assert figures["selection_prompts"] == 6
    assert figures["after"]["prompts"] == 12
    assert "picked on 6 other held-out prompts" in page.read_text()
    assert "were cut at the token limit" in page.read_text()
    assert figures["after"]["measured"]["ratio"]["mean"] > 0


def test_the_demo_refuses_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["demo", "--minutes", "0"])
    with pytest.raises(SystemExit) as stop:
        demo.main()
    assert stop.value.code == 2


@pytest.fixture
def static_draft(tmp_path: Path) -> Path:
    target = load_target(TargetConfig(path="tiny", dtype="float32", device="cpu"))
    save_draft(initialise_draft(DraftConfig(layers=2), target), tmp_path / "draft", target)
    return tmp_path / "draft"


def osd_arguments(prompts: Path, draft: Path) -> list[str]:
    amounts = "--requests 8 --max-tokens 12 --slots 4 --interval 6 --flush 3 --held-out 0.4 --exam-requests 2"
    learning = "--epochs 4 --learning-rate 2e-3 --batch-tokens 128 --loss fkl --fractions 1 --grid-losses fkl"
    segments = f"--segments sums={prompts} words={prompts} sums --grid-intervals 4"
    arms = "--arms flush interval verified product"
    return f"osd --target tiny --draft {draft} --output out {amounts} {learning} {segments} {arms}".split()


def test_the_osd_study_trains_its_arms_on_one_recorded_stream(
    tmp_path: Path,
    prompts: Path,
    static_draft: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", osd_arguments(prompts, static_draft))
    assert osd.main() == 0
    figures = json.loads(Path("out/results.json").read_text())
    arms = figures["arms"]
    assert set(arms) == {"static", "flush", "interval", "verified", "product"}
    assert all(len(arm["requests"]) == 24 for arm in arms.values())
    # Nobody is judged on what it has learnt: until its first update an arm is the static draft, to the digit.
    first = arms["flush"]["updates_after"][0][0]
    assert arms["flush"]["requests"][:first] == arms["static"]["requests"][:first]
    assert arms["flush"]["requests"][first:] != arms["static"]["requests"][first:]
    assert arms["flush"]["gain"]["mean"] > 0
    assert arms["interval"]["updates"] >= 2
    assert arms["product"]["updates"] >= 1
    ran = [*arms.values(), *figures["offline"].values(), *figures["grid"].values(), figures["recording"], figures]
    assert all(part["provenance"].keys() == figures["provenance"].keys() for part in ran)
    assert set(figures["offline"]) == {"0/1", "1/1", "2/1"}
    bias = figures["bias"]["flush"]
    assert bias["lower"] < bias["alpha"] < bias["upper"]
    assert abs(bias["estimate"] - bias["alpha"]) < 0.5 * (bias["upper"] - bias["lower"])
    assert set(figures["grid"]) == {"fkl-all-4", "fkl-rejected-4"}
    assert figures["grid"]["fkl-rejected-4"]["training_tokens"] < figures["grid"]["fkl-all-4"]["training_tokens"]
    assert all(Path("out", name).stat().st_size > 1000 for name in ("acceptance.png", "offline.png"))

    interval, verified = (json.loads(Path(f"out/arms/{name}.json").read_text()) for name in ("interval", "verified"))
    learnt = [sum(update["tokens"] for update in arm["updates"]) for arm in (interval, verified)]
    assert learnt[0] < learnt[1], "what follows rejected tokens is learnt too"
    Path("out/arms/interval.json").unlink()  # as if it had been cut off
    capsys.readouterr()
    assert osd.main() == 0
    said = capsys.readouterr().out
    assert "interval: " in said
    assert "flush: " not in said
    assert "recording" not in said
    assert json.loads(Path("out/arms/interval.json").read_text())["requests"] == interval["requests"]

    monkeypatch.setattr(sys, "argv", [*sys.argv, "--epochs", "2"])
    assert osd.main() == 2
    assert "another epochs" in capsys.readouterr().err


def test_a_stream_of_files_that_are_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["osd", "--draft", "d", "--output", str(tmp_path / "o"), "--segments", "a=no.jsonl"]
    )
    assert osd.main() == 2
    assert "no.jsonl: no such file" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_servers_take_turns_under_one_load_and_stand_still_between(
    tmp_path: Path,
    prompts: Path,
    static_draft: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    between_turns: set[str] = set()
    serve = Side.serve

    def watched(self: Side, arrivals: Any) -> Turn:
        turn = serve(self, arrivals)
        servers = [child for child in psutil.Process().children() if "serve" in child.cmdline()]
        assert len(servers) == 2
        deadline = time.monotonic() + 20
        while any(server.status() != "stopped" for server in servers) and time.monotonic() < deadline:
            time.sleep(0.01)  # a busy machine delivers signals late
        between_turns.update(server.status() for server in servers)
        return turn

    monkeypatch.setattr(Side, "serve", watched)
    amounts = "--turns 1 1 --turn-seconds 1 --rate 8 --max-tokens 48 --sides static online"
    words = "--words target.path=tiny target.device=cpu --online-words adapt.every_requests=4 adapt.min_requests=2"
    words += " online.metrics_s=0.1"
    arguments = f"live --draft {static_draft} --segments a={prompts} b={prompts} {amounts} --output out {words}"
    monkeypatch.setattr(sys, "argv", arguments.split())
    assert live.main() == 0
    record = json.loads(Path("out/live.json").read_text())
    assert between_turns == {"stopped"}  # nobody slows the others
    assert record["domains"] == ["a", "b"]
    for turns in record["turns"].values():
        assert all(turn["requests"] > 0 and turn["failed"] == 0 for turn in turns)
    assert record["turns"]["static"][0]["requests"] == record["turns"]["online"][0]["requests"]
    ratio = record["online_over_static"]["shifted"]
    assert ratio["over_requests"]["low"] <= ratio["over_requests"]["mean"] <= ratio["over_requests"]["high"]
    assert record["cpu"]["static"]["trainer_s"] == 0 < record["cpu"]["static"]["server_s"]
    assert record["cpu"]["online"]["by_work_s"]["logging"] > 0
    assert record["met"]["logging"] is not None
    assert any(Path("out/online/replay").iterdir())  # it logs what it answered
    with pytest.raises(SystemExit):  # a second run into the same folder would mix two loads
        live.main()
    assert "is there already" in capsys.readouterr().err
