"""Steps that draft nothing touch no draft: no pass, no reading of prompts, not even a question to the proposer."""

from __future__ import annotations

import pytest

from distillspec.models import LanguageModel
from distillspec.serving import Engine, Request, SamplingParams
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.proposers.draft_model import DraftModel
from distillspec.serving.proposers.side_by_side import SideBySide

from .conftest import MakeEngine, prompts, ticks

DEAR = LatencyModel(CostTable.line(1e-7, 1e-4, 1e-2), CostTable.line(1e-7, 1.0, 10.0))
CONTROLLERS = {
    "never": lambda: FixedLength(0),
    "goodput that learns": lambda: GoodputController(4),
    "goodput with a dear draft": lambda: GoodputController(4, DEAR),
}


def draft_passes(engine: Engine) -> int:
    proposer = engine.proposer
    model = proposer.proposers["draft"] if isinstance(proposer, SideBySide) else proposer
    assert isinstance(model, DraftModel)
    return model.runner.passes


@pytest.mark.parametrize("proposer", ["draft_model", "lookup_else_model"])
@pytest.mark.parametrize("name", list(CONTROLLERS))
def test_plain_steps_touch_no_draft(
    draft: LanguageModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, proposer: str, name: str
) -> None:
    controller: LengthController = CONTROLLERS[name]()
    options = {} if proposer == "draft_model" else {"shortest": 1}
    engine = make_engine(draft, proposer=proposer, controller_object=controller, proposer_options=options)
    engine.clock = ticks()
    asked = 0
    propose = engine.proposer.propose  # type: ignore[union-attr]

    def counted(requests: list) -> list:  # type: ignore[type-arg]
        nonlocal asked
        asked += 1
        return propose(requests)

    monkeypatch.setattr(engine.proposer, "propose", counted)
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    plain = 0
    for step in range(30):
        if step % 5 == 0:  # prompts are read in plain steps too
            engine.submit(Request(str(step), tuple(prompts()[step // 5]), params))
        before = draft_passes(engine), asked
        result = engine.step().result
        if result is not None and not any(row.speculation_length for row in result.plan.rows):
            plain += 1
            assert (draft_passes(engine), asked) == before
    assert plain >= 3
    if name == "never":
        assert draft_passes(engine) == asked == 0
    if name == "goodput that learns":
        assert asked > 0, "this one drafts too, or the test shows nothing"
