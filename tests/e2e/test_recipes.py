"""The recipes as one command each, on the tiny target."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from distillspec.recipes.demo import __main__ as demo
from distillspec.recipes.distillspec import __main__ as study
from distillspec.recipes.distillspec import cells, results
from distillspec.recipes.distillspec.grid import Study


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [{"prompt": f"What is {i} plus {i + 1}?", "response": f"It is {2 * i + 1}."} for i in range(24)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


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


def test_the_demo_ends_with_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo", "--minutes", "0.2", "--target", "tiny"])
    assert demo.main() == 0
    (page,) = tmp_path.glob("runs/demo/*/report/report.html")
    assert "α" in page.read_text()
    (summary,) = tmp_path.glob("runs/demo/*/summary.json")
    figures = json.loads(summary.read_text())
    assert figures["before"]["measured"] is not None
    assert figures["after"]["measured"]["ratio"]["mean"] > 0


def test_the_demo_refuses_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["demo", "--minutes", "0"])
    with pytest.raises(SystemExit) as stop:
        demo.main()
    assert stop.value.code == 2
