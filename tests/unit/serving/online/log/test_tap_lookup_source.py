"""Tokens of a prompt lookup never count for the draft model: acceptance, log, metrics and the request's own."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from distillspec.config import GateConfig
from distillspec.models import LanguageModel
from distillspec.serving import Engine, Request, RequestOutput, SamplingParams
from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.tree import TokenTree
from distillspec.serving.online.gate.monitor import ServedAcceptance
from distillspec.serving.online.log.records import PLAIN, REJECTED
from distillspec.serving.proposers.base import ProposalRequest
from distillspec.serving.proposers.side_by_side import SideBySide
from distillspec.serving.server.bridge.engine_thread import StepReport
from distillspec.serving.server.observability.acceptance_counters import VERSIONS, AcceptanceCounters
from distillspec.serving.server.observability.telemetry import Telemetry
from distillspec.serving.step.commit import Emission

from ...conftest import MakeEngine
from .test_tap import tapped

prometheus = pytest.importorskip("prometheus_client")
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
FOUND = [*range(3, 250)]  # every byte: with single tokens looked up, something always follows


class Watched:
    """Serves requests, and counts whose drafted tokens were tried and accepted, by who really proposed them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.version = engine.draft_version
        self.tap, self.logged = tapped()
        self.served = ServedAcceptance(GateConfig(bootstrap_samples=100))
        self.telemetry = Telemetry(4)
        self.registry = prometheus.CollectorRegistry()
        self.counters = AcceptanceCounters("test:", "tiny", self.registry)
        self.by_lookup: Counter[str] = Counter()
        self.by_model: Counter[str] = Counter()
        self.done: dict[str, RequestOutput] = {}
        self._looked_up: set[str] = set()
        engine.observer = self._observe
        proposer = engine.proposer
        assert isinstance(proposer, SideBySide)
        lookup = proposer.proposers["lookup"]
        propose = lookup.propose

        def noted(requests: list[ProposalRequest]) -> list[TokenTree]:
            trees = propose(requests)
            self._looked_up = {r.sequence.id for r, tree in zip(requests, trees, strict=True) if len(tree)}
            return trees

        lookup.propose = noted  # type: ignore[method-assign, assignment]

    def _observe(self, emissions: list[Emission], logits: Any) -> None:
        self.tap(emissions, logits)
        self.served.watch(emissions)

    def serve(self, prompts: dict[str, list[int]]) -> None:
        for name, prompt in prompts.items():
            self.engine.submit(Request(name, tuple(prompt), PARAMS))
        while self.engine.has_work:
            self._looked_up = set()
            output = self.engine.step()
            assert output.result is not None
            for row in output.result.rows:
                counts = self.by_lookup if row.sequence_id in self._looked_up else self.by_model
                counts.update(tried=row.tried, accepted=row.kept)
                self.counters.observe({"draft": self.version}, [row])
            self.telemetry.observe_step(StepReport(output, 1, 0, 0, {"draft": self.version}))
            self.tap.finish(output.finished)
            self.served.finish(output.finished)
            self.done.update({finished.request_id: finished for finished in output.finished})

    def counted(self, version: str) -> tuple[float | None, float | None]:
        """Tried and accepted, as Prometheus tells."""
        labels = {"model_name": "tiny", "draft_version": version, "domain": "default"}
        names = ("test:draft_tokens_judged_total", "test:draft_tokens_accepted_total")
        tried, accepted = (self.registry.get_sample_value(name, labels) for name in names)
        return tried, accepted


def test_what_a_lookup_proposed_is_not_the_drafts(draft: LanguageModel, make_engine: MakeEngine) -> None:
    engine = make_engine(
        draft,
        proposer="lookup_else_model",
        proposer_options={"longest": 2, "shortest": 2},
        max_model_len=300,
        speculation_length=3,
    )
    watched = Watched(engine)
    watched.serve({f"r{i}": [*range(40 + i, 90), *range(40 + i, 70)] * 2 for i in range(4)})
    model, lookup = watched.by_model, watched.by_lookup
    assert model["tried"] > 5
    assert lookup["tried"] > 5
    rates = [counts["accepted"] / counts["tried"] for counts in (model, lookup)]
    assert rates[0] != rates[1], "the two must be told apart by their figures"
    ours = (model["tried"], model["accepted"])
    figures = watched.served.figures()["versions"]
    assert {v: (counts["tried"], counts["accepted"]) for v, counts in figures.items()} == {watched.version: ours}
    assert sum(answer.tried for answer in watched.logged) == ours[0]
    assert sum(answer.accepted for answer in watched.logged) == ours[1]
    assert watched.counted(watched.version) == ours
    assert watched.counted("") == (lookup["tried"], lookup["accepted"])
    shown = watched.telemetry.state()["acceptance"]
    assert {v: counts["tried"] for v, counts in shown.items()} == {watched.version: ours[0], "": lookup["tried"]}
    for answer in watched.logged:
        of_draft = answer.outcomes <= REJECTED
        assert bool((answer.draft_tokens[~of_draft] == -1).all())
        assert bool(answer.draft_probs[~of_draft].isnan().all())
        assert set(answer.draft_versions) == {"", watched.version}
        by_lookup = [answer.draft_versions[int(v)] == "" for v in answer.version_of]
        assert all(int(answer.outcomes[i]) == PLAIN for i, own in enumerate(by_lookup) if own)


def test_a_request_that_lookups_served_names_no_draft(draft: LanguageModel, make_engine: MakeEngine) -> None:
    engine = make_engine(draft, proposer="lookup_else_model", proposer_options={"shortest": 1}, max_model_len=300)
    watched = Watched(engine)
    watched.serve({"found": FOUND})
    stats = watched.done["found"].stats
    assert watched.by_model["tried"] == 0
    assert stats.proposed > 0
    assert stats.draft_versions == []
    assert watched.served.figures()["versions"] == {}


def test_lookups_stay_counted_however_many_versions_come() -> None:
    registry = prometheus.CollectorRegistry()
    counters = AcceptanceCounters("test:", "tiny", registry)
    counters.observe({"draft": "0"}, [RowResult.chain("r", 2, 1, 2, source="lookup")])
    for version in range(VERSIONS):
        counters.observe({"draft": str(version)}, [RowResult.chain("r", 2, 1, 2)])

    def judged(version: str) -> float | None:
        labels = {"model_name": "tiny", "draft_version": version, "domain": "default"}
        return registry.get_sample_value("test:draft_tokens_judged_total", labels)

    assert judged("") == judged("0") == 2
    counters.observe({"draft": str(VERSIONS)}, [RowResult.chain("r", 2, 1, 2)])
    assert (judged(""), judged("0"), judged("1")) == (2, None, 2)
