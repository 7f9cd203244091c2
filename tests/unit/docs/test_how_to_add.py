"""docs/how-to-add.md, followed step by step: every block of it is run, and what it adds works."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from distillspec.composition import compose
from distillspec.config import registry
from distillspec.losses import LOSSES as REFERENCES
from distillspec.losses import LossMix, per_token_loss
from distillspec.losses.inputs import LossInputs
from distillspec.models import LanguageModel, initialise_draft
from distillspec.serving import Engine, SamplingParams
from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.plans import Plan, RowPlan, StepResult
from distillspec.serving.base.rows import BatchView, Option, RowView
from distillspec.serving.costs.latency import guessed
from distillspec.serving.selection.base import SelectionParts
from distillspec.serving.selection.by_name import make_selection
from distillspec.serving.server.bridge.engine_thread import StepReport
from distillspec.serving.server.observability.metrics import Metrics
from distillspec.serving.simulation.by_name import load_hardware, load_workload
from distillspec.serving.simulation.clock import Simulation
from distillspec.serving.simulation.policies import make_policy
from distillspec.serving.simulation.workload import make_workload
from distillspec.serving.step.output import StepOutput

from .pages import ROOT, page

PAGE = page("docs/how-to-add.md")
PROMPT = [30, 31, 32, 33, 33]


def section(title: str) -> str:
    return PAGE.text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def block(title: str, marker: str) -> str:
    found = re.findall(rf"^```{marker}\n(.*?)^```$", section(title), re.MULTILINE | re.DOTALL)
    assert len(found) == 1, f"{title}: {len(found)} blocks of {marker}"
    return found[0]


def follow(title: str, table: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Add the page's module and its line of `table`. Return the name that was added."""
    code = block(title, "python")
    path = code.splitlines()[0].removeprefix("# ").removesuffix(".py")
    assert not (ROOT / f"{path}.py").exists(), f"{path}.py exists: the page needs another example"
    name = path if path.startswith("distillspec/") else f"distillspec/{path}"
    module = ModuleType(name.replace("/", "."))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, path, "exec"), module.__dict__)
    ((key, choice),) = eval("{" + block(title, "python registry") + "}", vars(registry)).items()
    assert f"`{table}`" in section(title)
    monkeypatch.setitem(getattr(registry, table), key, choice)
    assert choice.code.split(":")[0] == module.__name__
    return key


def test_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    name = follow("A loss", "LOSSES", monkeypatch)
    config = compose("train", ["target=tiny", f"loss={name}", "+loss.params.scale=2"])
    (term,) = LossMix.parse(config.loss.terms).terms
    draft, target = torch.randn(5, 7), torch.randn(5, 7)
    expected = 2 * (target.softmax(-1) - draft.softmax(-1)).square().sum(-1)
    found = per_token_loss(term.name, LossInputs(draft, target_logits=target), **term.params).values
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(REFERENCES[name](draft, target, scale=2), expected)


def test_a_draft_kind(target: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    name = follow("A draft kind", "DRAFT_KINDS", monkeypatch)
    draft = initialise_draft(compose("train", ["target=tiny", f"draft={name}"]).draft, target)
    assert len(draft.layers) == 2
    ids = torch.tensor([PROMPT])
    assert draft.model(ids).logits.shape == target.model(ids).logits.shape


def test_a_proposer_and_a_controller(target: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = follow("A proposer", "PROPOSERS", monkeypatch)
    controller = follow("A controller", "CONTROLLERS", monkeypatch)
    words = ["engine.max_model_len=64", "engine.max_slots=2", "engine.speculation_length=3"]
    plain = answer(target, words)
    own = [f"engine.proposer={proposer}", f"engine.controller={controller}"]
    tokens, proposed = answer(target, [*words, *own])
    assert proposed > 0
    assert (tokens, 0) == plain
    assert answer(target, [*words, *own, "+engine.controller_options.rows=0"]) == plain


def test_a_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    name = follow("A selection", "SELECTIONS", monkeypatch)
    settings = compose("serve", ["drafts=[a,b]", f"engine.selection={name}"]).engine
    parts = SelectionParts(("a", "b"), settings.seed, guessed)
    selection = make_selection(settings.selection, parts, {"otherwise": "b"})
    options = (Option(3, source="b"),)
    rows = [RowView(domain, 9, 3, source="a", others=options, domain=domain) for domain in ("a", "sql")]
    assert selection.choose(rows) == {"a": "a", "sql": "b"}


def answer(target: LanguageModel, words: list[str]) -> tuple[tuple[int, ...], int]:
    """Return the greedy tokens after `PROMPT` and the number of proposed tokens."""
    engine = Engine(target, settings=compose("bench", ["bench.prompts=[p]", *words]).engine)
    try:
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        (found,) = engine.generate([PROMPT], params)
    finally:
        engine.close()
    return tuple(found.completions[0].token_ids), found.completions[0].stats.proposed


def test_a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    code = block("A metric", "python")
    assert (ROOT / code.splitlines()[0].removeprefix("# ")).is_file()
    added: dict[str, Any] = {}
    exec(code, added)
    for name in ("declare_gauges", "observe_step"):
        monkeypatch.setattr(Metrics, name, both(getattr(Metrics, name), added[name]))
    metrics = Metrics("m", speculation_length=4, slots=2, cache_tokens=100)
    view = BatchView((RowView("a", 9, 4), RowView("b", 9, 4)))
    plan = Plan(tuple([RowPlan.chain(row, 1) for row in view.rows]))
    rows = (RowResult.chain("a", 1, 1, 2), RowResult.chain("b", 1, 0, 1))
    result = StepResult(rows, view, plan, 0, 0.1, 0.1, 0.3)
    metrics.observe_step(StepReport(StepOutput(result=result), 2, 0, 20, {}))
    assert b'distillspec:step_rows{model_name="m"} 2.0' in metrics.text()


def both(first: Any, second: Any) -> Any:
    def run(self: Metrics, *words: Any) -> None:
        first(self, *words)
        second(self, *words)

    return run


def test_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = block("A machine", "yaml")
    path = Path(text.splitlines()[0].removeprefix("# "))
    assert not (ROOT / path).exists()
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware" / path.name).write_text(text)
    workload = load_workload("even", requests=5)
    monkeypatch.setattr(importlib.import_module("distillspec.conf"), "__path__", [str(tmp_path)])
    hardware = load_hardware(path.stem)
    assert hardware.latency.target_s([], [], 0) == pytest.approx(0.026)  # as its comment says
    assert hardware.latency.target_s([0], [0]) - 0.026 == pytest.approx(2.5e-3)
    requests = make_workload(workload, rate=1.0)
    result = Simulation(requests, make_policy("goodput", hardware.latency, requests), hardware).run()
    assert len(result.stats) == 5


def test_the_page_has_a_section_for_each_table_and_no_more() -> None:
    sections = re.findall(r"^## (.+)$", PAGE.text, re.MULTILINE)
    assert sections == ["A loss", "A draft kind", "A proposer", "A controller", "A selection", "A metric", "A machine"]
    fences = re.findall(r"^```(\w.*)$", PAGE.text, re.MULTILINE)
    assert sorted(fences) == ["python"] * 6 + ["python registry"] * 5 + ["yaml"]
