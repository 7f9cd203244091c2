"""The Python of README and docs runs: on the tiny target, with a draft where the page has one of the reader's."""

from __future__ import annotations

from pathlib import Path

import pytest

from distillspec.config import DraftConfig
from distillspec.models import LanguageModel, initialise_draft, save_draft

from .pages import page

PRINTS = {  # page: whether its example prints
    "README.md": True,
    "docs/distilling.md": True,
    "docs/serving.md": True,
    "docs/adapting.md": False,
}


@pytest.mark.parametrize("name", PRINTS)
def test_the_example_runs_and_prints(
    name: str,
    target: LanguageModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = "\n".join(page(name).python())
    monkeypatch.chdir(tmp_path)
    save_draft(initialise_draft(DraftConfig(layers=1), target), tmp_path / "runs/train/MY_RUN", target=target)
    assert 'path="smollm2"' in code or 'pretrained("smollm2"' in code
    names: dict[str, object] = {}
    exec(code.replace('"smollm2"', '"tiny"'), names)
    out = capsys.readouterr().out
    assert bool(out.strip()) == PRINTS[name]
    if (engine := names.get("engine")) is not None:
        engine.close()  # type: ignore[attr-defined]
