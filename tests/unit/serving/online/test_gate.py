"""What gets in, what is refused, what is sent back."""

from __future__ import annotations

import copy
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from distillspec.config import DraftConfig, GateConfig
from distillspec.errors import ConfigError
from distillspec.evaluation import TargetStates
from distillspec.evaluation.bootstrap import relative_gain
from distillspec.models import LanguageModel, initialise_draft, save_draft
from distillspec.models.draft import load_pretrained
from distillspec.serving import Request, SamplingParams
from distillspec.serving.online.gate import Comparison, Costs, Verdict, decide
from distillspec.serving.online.gatekeeper import Gatekeeper
from distillspec.serving.online.layout import OnlineSettings
from distillspec.serving.online.monitor import ServedAcceptance, _Open
from distillspec.serving.online.process import write_settings
from distillspec.serving.online.registry import Version, VersionRegistry
from distillspec.serving.online.replay_log import ReplayLog
from distillspec.serving.online.shadow import Exam, Score, ServedStates, Shadow
from distillspec.serving.online.trainer import OnlineTrainer
from distillspec.types import Interval

from ..conftest import MakeEngine, prompts
from ..test_draft_swap import rewrite
from .conftest import Answer

COSTS = Costs(draft=0.1, verify=0.05)
CONFIG = GateConfig(domain_requests=4, bootstrap_samples=500)


def scores(alphas: list[float], domain: str = "a") -> list[Score]:
    """What drafts with so steady an acceptance would score on 40 tokens, γ = 1 and 2."""
    made = []
    for a in alphas:
        tokens, blocks = 40.0, (40 / (1 + a), 40 / (1 + a + a * a))
        made.append(Score(domain, (tokens, tokens), blocks, a * 40, 40))
    return made


def verdict_of(before: list[Score], after: list[Score], config: GateConfig = CONFIG, offline=None):  # type: ignore[no-untyped-def]
    return decide("new", "old", Comparison(before, after, COSTS), offline, config)


def test_a_sure_gain_is_let_in_and_an_unsure_one_waits() -> None:
    easy_and_hard = [0.1 + 0.02 * i for i in range(30)]
    better = verdict_of(scores(easy_and_hard), scores([a + 0.03 for a in easy_and_hard]))
    assert better.decision == "promoted"
    assert better.gain is not None
    assert 0 < better.gain.low < better.gain.mean < better.gain.high
    # The same mean gain, but of opposite signs: paired differences tell them apart, pooled ones would not.
    mixed = [a + (0.2 if i % 2 else -0.14) for i, a in enumerate(easy_and_hard)]
    assert verdict_of(scores(easy_and_hard), scores(mixed)).decision == "inconclusive"
    worse = verdict_of(scores(easy_and_hard), scores([a - 0.05 for a in easy_and_hard]))
    assert worse.decision == "refused"
    assert verdict_of(scores(easy_and_hard), scores(easy_and_hard)).decision == "inconclusive"
    margin = replace(CONFIG, margin=0.5)
    assert verdict_of(scores([0.3] * 20), scores([0.4] * 20), margin).decision == "inconclusive"


def test_a_loss_on_one_domain_or_on_the_offline_set_is_refused() -> None:
    before = scores([0.3] * 20) + scores([0.5] * 5, "b")
    after = scores([0.6] * 20) + scores([0.2] * 5, "b")
    verdict = verdict_of(before, after)
    assert verdict.decision == "refused"
    assert "on b" in verdict.reason
    assert verdict.domains["a"] > 0 > verdict.domains["b"]
    few = verdict_of(before[:-2], after[:-2])  # three requests are no evidence of their own
    assert few.decision == "promoted"
    offline = Comparison(scores([0.6] * 5), scores([0.4] * 5), COSTS)
    assert "offline" in verdict_of(scores([0.3] * 20), scores([0.6] * 20), offline=offline).reason


def test_a_better_draft_is_let_in_where_neither_is_worth_its_cost() -> None:
    dear = Costs(draft=2.0, verify=1.0)
    verdict = decide("n", "o", Comparison(scores([0.1] * 20), scores([0.3] * 20), dear), None, CONFIG)
    assert verdict.decision == "promoted"
    assert verdict.goodput is not None
    assert max(verdict.goodput) < 1


def test_the_paired_bootstrap_is_that_of_the_ratio() -> None:
    gain = relative_gain(([2, 2], [1, 1]), ([3, 3], [1, 1]), 100, 0)
    assert (gain.mean, gain.low, gain.high) == (0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="no ratio"):
        relative_gain(([0, 0], [1, 1]), ([3, 3], [1, 1]), 100, 0)


@pytest.mark.numerics
def test_the_served_targets_states_are_its_own(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, answer: Answer
) -> None:
    sample = answer("a").sample()
    plain = TargetStates(target).hidden(sample)
    make_engine(draft)  # takes the target over
    torch.testing.assert_close(ServedStates(target).hidden(sample), plain, atol=1e-5, rtol=1e-5)


def nearly_the_target(target: LanguageModel, seed: int = 1) -> LanguageModel:
    """A draft of all the target's layers, a little off."""
    made = initialise_draft(DraftConfig(layers=4), target)
    with torch.no_grad():
        for parameter in made.layers.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    return made


@pytest.fixture
def held_out(replay: ReplayLog, answer: Answer) -> ReplayLog:
    replay.append([answer(f"r{i}", split="held_out") for i in range(12)])
    return replay


def keeper_of(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, target: LanguageModel, **extra: object
) -> Gatekeeper:
    states = ServedStates(target) if "swap" in extra and "served" in extra else TargetStates(target)
    shadow = Shadow(target, states, settings.gate.max_gamma)
    return Gatekeeper(settings, registry, replay, shadow, **extra)  # type: ignore[arg-type]


def candidate(registry: VersionRegistry, draft: LanguageModel, target: LanguageModel) -> Version:
    current = registry.current()
    return registry.add(lambda f: save_draft(draft, f, target), parent=None if current is None else current.name)


def test_a_better_candidate_is_swapped_in_and_promoted_with_its_numbers(
    settings: OnlineSettings, registry: VersionRegistry, held_out: ReplayLog, target: LanguageModel
) -> None:
    overtaken = candidate(registry, nearly_the_target(target), target)
    better = candidate(registry, nearly_the_target(target), target)
    swapped: list[str] = []
    keeper = keeper_of(settings, registry, held_out, target, swap=lambda version: swapped.append(version.name))
    verdict = keeper.judge_newest()
    assert verdict is not None
    assert verdict.decision == "promoted"
    assert verdict.alpha is not None
    assert verdict.alpha[1].mean > verdict.alpha[0].mean + 0.1
    assert swapped == [better.name]
    recorded = registry.get(better.name)
    assert recorded.status == "promoted"
    assert recorded.verdict["gain"]["low"] > 0
    assert json.dumps(recorded.verdict)
    assert registry.get(overtaken.name).status == "inconclusive"
    assert keeper.judge_newest() is None


def test_versions_out_of_service_do_not_fill_the_disk(
    settings: OnlineSettings, registry: VersionRegistry, held_out: ReplayLog, target: LanguageModel
) -> None:
    few = replace(settings, online=replace(settings.online, keep_versions=1))
    keeper = keeper_of(few, registry, held_out, target)
    made = []
    for _ in range(4):
        made.append(candidate(registry, nearly_the_target(target), target))
        keeper.judge_newest()
    assert [v.status for v in registry.versions()] == ["retired", "promoted", *["inconclusive"] * 3]
    assert [v.present for v in registry.versions()] == [True, True, False, False, True]
    assert [v.path.is_dir() for v in made] == [True, False, False, True]


def test_without_held_out_requests_a_candidate_waits(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, target: LanguageModel, answer: Answer
) -> None:
    replay.append([answer(f"r{i}") for i in range(12)])  # of the training split: not to be judged on
    waiting = candidate(registry, nearly_the_target(target), target)
    keeper = keeper_of(settings, registry, replay, target)
    assert keeper.judge_newest() is None
    assert keeper.waiting_for == "0 of 4 held-out requests"
    assert registry.get(waiting.name).status == "candidate"


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _not_a_number(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"][:] = torch.nan
    rewrite(folder, lambda: save_file(state, folder / "model.safetensors", metadata={"format": "pt"}))


def _other_shape(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    name = next(name for name in state if name.endswith("mlp.up_proj.weight"))
    state[name] = state[name][:-1].clone()
    rewrite(folder, lambda: save_file(state, folder / "model.safetensors", metadata={"format": "pt"}))


def _other_tokenizer(folder: Path) -> None:
    file = folder / "tokenizer.json"
    words = json.loads(file.read_text())
    words["added_tokens"][0]["content"] = "<|another|>"
    rewrite(folder, lambda: file.write_text(json.dumps(words)))


@pytest.mark.parametrize("damage", [_truncate, _not_a_number, _other_shape, _other_tokenizer])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_bad_candidate_is_refused_and_the_old_one_serves(
    settings: OnlineSettings,
    registry: VersionRegistry,
    held_out: ReplayLog,
    target: LanguageModel,
    damage: Callable[[Path], None],
    when: str,
) -> None:
    """Damaged by the trainer itself (sealed with good digests), or on disk after it was registered."""
    serving = registry.current()

    def write(folder: Path) -> None:
        save_draft(nearly_the_target(target), folder, target)
        if when == "before" and damage is not _truncate:
            damage(folder)

    bad = registry.add(write)
    if when == "after" or damage is _truncate:
        damage(bad.path)
    keeper = keeper_of(settings, registry, held_out, target, swap=lambda version: pytest.fail("swapped in"))
    verdict = keeper.judge_newest()
    assert verdict is not None
    assert verdict.decision == "refused"
    assert "cannot be judged" in verdict.reason
    assert registry.current() == serving


def test_a_candidate_that_the_engine_refuses_is_not_promoted(
    settings: OnlineSettings, registry: VersionRegistry, held_out: ReplayLog, target: LanguageModel
) -> None:
    serving = registry.current()
    refused = candidate(registry, nearly_the_target(target), target)

    def swap(version: Version) -> None:
        raise ConfigError("no room for it")

    verdict = keeper_of(settings, registry, held_out, target, swap=swap).judge_newest()
    assert verdict is not None
    assert registry.get(refused.name).status == "refused"
    assert registry.current() == serving


def test_a_server_killed_in_mid_swap_boots_what_was_promoted_last(
    settings: OnlineSettings, registry: VersionRegistry, held_out: ReplayLog, target: LanguageModel
) -> None:
    first = registry.current()
    assert first is not None
    better = candidate(registry, nearly_the_target(target), target)
    write_settings(replace(settings, gate=replace(settings.gate, requests=4, bootstrap_samples=100)))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("kill_in_swap.py")), settings.online.folder],
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
    )
    said = [line.removeprefix("server: ") for line in done.stdout.splitlines() if line.startswith("server: ")]
    assert said == [
        f"loaded killed {first.name}",
        f"promoting killed {first.name}",
        f"promoted killed {better.name}",
        f"None 0 {better.name}",
    ], done.stderr


def test_a_restart_knows_the_acceptance_that_was_served_before(
    settings: OnlineSettings, registry: VersionRegistry
) -> None:
    """A rollback compares with the predecessor, which may have served under an earlier process."""
    before = ServedAcceptance(settings.gate)
    for i in range(40):
        feed(before, "old", "a", 10, 8 + i % 2)
    registry.keep_served(before.take_news())
    assert before.take_news() == []
    after = ServedAcceptance(settings.gate)
    after.recall(VersionRegistry(settings.layout.versions).served())
    assert after.acceptance("old") == before.acceptance("old")
    assert after.figures()["versions"]["old"]["tried"] == 400
    for _ in range(10):
        feed(after, "new", "a", 10, 3)
    assert "with old" in str(after.regression("new", "old"))
    assert after.accepted_gain("old") == pytest.approx(30 - 0.85 * 100)
    registry.keep_served(after.take_news())
    assert {record.version: record.totals["requests"] for record in registry.served()} == {"old": 40, "new": 10}
    registry.clear_away(keep=0)  # neither is a version here: their figures stay, what is compared with goes
    assert [(record.seen, record.totals["tried"]) for record in registry.served()] == [([], 400), ([], 100)]


def test_a_regression_after_the_gate_is_rolled_back_within_500_requests(
    settings: OnlineSettings, held_out: ReplayLog, target: LanguageModel, make_engine: MakeEngine, tmp_path: Path
) -> None:
    good = nearly_the_target(target)
    registry = VersionRegistry(settings.layout.versions, clock=lambda: 500.0)  # the held-out answers are of its time
    first = candidate(registry, good, target)
    registry.promote(first.name, "the beginning")
    engine = make_engine(load_pretrained(str(first.path), target, target.dtype), speculation_length=2)
    served = ServedAcceptance(settings.gate)
    told: list[dict] = []
    keeper = keeper_of(
        settings,
        registry,
        held_out,
        target,
        swap=lambda version: engine.load_draft(version.path) and None,
        served=served,
        report=told.append,
    )
    engine.core.committer.observer = lambda emissions, logits: served.watch(emissions)
    count = 0

    def serve(requests: int) -> None:
        nonlocal count
        for _ in range(requests):
            params = SamplingParams(max_tokens=8, ignore_eos=True, seed=count)
            engine.submit(Request(f"r{count}", tuple(prompts()[count % 6][:20]), params))
            count += 1
        while engine.has_work:
            served.finish(engine.step().finished)

    serve(48)
    worse = copy.deepcopy(good)
    with torch.no_grad():
        for parameter in worse.layers.parameters():
            parameter.zero_()
    second = candidate(registry, replace(good, model=worse.model), target)
    registry.promote(second.name, "slipped through")  # behind the gate's back
    keeper.work()
    assert keeper.serving is not None
    assert keeper.serving.name == second.name
    began = count
    while keeper.serving.name == second.name and count - began < 500:
        serve(16)
        keeper.work()
    assert keeper.serving.name == first.name
    assert registry.current() == registry.get(first.name)
    assert registry.get(second.name).status == "rolled_back"
    assert [record["event"] for record in told] == ["suspicion", "rollback"]
    assert "12 held-out requests read under both" in registry.get(second.name).reason
    serve(4)
    figures = served.figures()["versions"]
    assert set(figures) == {first.served_as, second.served_as}
    assert figures[first.served_as]["alpha"] > figures[second.served_as]["alpha"]


def test_harder_traffic_is_suspicious_and_sends_nobody_back(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, target: LanguageModel
) -> None:
    """All in one domain, so that no weighing can tell the traffic from the draft; nothing is held out to tell them."""
    served, told = ServedAcceptance(settings.gate), []
    keeper = keeper_of(settings, registry, replay, target, served=served, report=told.append)
    base = registry.current()
    assert base is not None
    second = candidate(registry, nearly_the_target(target), target)
    for _ in range(32):
        feed(served, base.served_as, "a", 10, 8)
    registry.promote(second.name, "better")
    child = candidate(registry, nearly_the_target(target, seed=2), target)
    for accepted in (3, 3, 2):
        for _ in range(32):
            feed(served, second.served_as, "a", 10, accepted)
        keeper.work()
    assert registry.current() == registry.get(second.name)
    assert keeper.serving is not None
    assert keeper.serving.name == second.name
    assert [record["event"] for record in told] == ["suspicion"]  # said once
    assert keeper.suspicion is not None
    assert registry.get(second.name).reason.startswith("suspected: acceptance 0.3")
    assert [registry.get(version.name).status for version in (base, second)] == ["retired", "promoted"]
    # What was made from it is neither refused nor given up.
    OnlineTrainer(settings).state.with_(working=child.name).write(settings.layout.state)
    assert OnlineTrainer(settings)._parent() == registry.get(child.name)
    for _ in range(settings.gate.window):
        feed(served, second.served_as, "a", 10, 8)
    keeper.work()
    assert keeper.suspicion is None
    assert registry.get(second.name).reason == ""


@pytest.fixture
def suspected(
    settings: OnlineSettings, registry: VersionRegistry, held_out: ReplayLog, target: LanguageModel
) -> Gatekeeper:
    """Its second version is suspected; what a verdict on it says is up to the test (`say`)."""
    keeper = keeper_of(settings, registry, held_out, target, served=ServedAcceptance(settings.gate))
    first, second = registry.current(), candidate(registry, nearly_the_target(target), target)
    assert first is not None
    assert keeper._served is not None
    for _ in range(32):
        feed(keeper._served, first.served_as, "a", 10, 8)
    registry.promote(second.name, "slipped through")
    keeper.follow()
    for _ in range(32):
        feed(keeper._served, second.served_as, "a", 10, 3)
    keeper.watch()
    assert keeper.suspicion is not None
    entries = held_out.entries(split="held_out")
    keeper._judge.held_out = lambda since_s=0.0: entries  # type: ignore[method-assign]
    return keeper


def say(keeper: Gatekeeper, verdict: Verdict, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Every verdict of its judge is this one; `meanwhile` happens while it is found."""

    def found(*given: object) -> Verdict:
        meanwhile()
        return verdict

    keeper._judge.verdict = found  # type: ignore[method-assign]


def test_a_suspicion_ends_with_the_service_of_its_version(suspected: Gatekeeper, registry: VersionRegistry) -> None:
    registry.rollback("by hand, elsewhere")
    suspected.follow()
    suspected.watch()  # nothing was served since the last look
    assert suspected.suspicion is None


def test_acceptance_that_recovers_during_the_verdict_clears_the_version(
    suspected: Gatekeeper, registry: VersionRegistry
) -> None:
    serving, served = suspected.serving, suspected._served
    assert serving is not None
    assert served is not None

    def recover() -> None:
        for _ in range(suspected.config.window):
            feed(served, serving.served_as, "a", 10, 8)
        suspected.watch()

    say(suspected, Verdict(serving.name, "old", "refused", "", gain=Interval(-0.2, -0.3, -0.1)), recover)
    assert suspected.look_into_suspicion() is not None
    assert suspected.suspicion is None
    assert registry.current() == registry.get(serving.name)
    assert registry.get(serving.name).reason == ""


def test_only_a_verdict_puts_off_the_next_look(suspected: Gatekeeper) -> None:
    """Texts deleted in mid-judgement leave nothing decided; what cannot be judged at all is not tried at every poll."""
    assert suspected.suspicion is not None
    first_look, name = suspected.suspicion.next_look, suspected.suspicion.version.name
    say(suspected, Verdict(name, "old", "inconclusive", "texts were deleted"))
    for _ in range(2):
        assert suspected.look_into_suspicion() is not None
        assert suspected.suspicion.next_look == first_look
    gain = Interval(0.0, -0.1, 0.1)
    for decided in (Verdict(name, "old", "inconclusive", "", gain=gain), Verdict(name, "old", "refused", "no memory")):
        suspected.suspicion = replace(suspected.suspicion, next_look=first_look)
        say(suspected, decided)
        assert suspected.look_into_suspicion() is not None
        assert suspected.suspicion.next_look == 24
        assert suspected.look_into_suspicion() is None


class EqualDrafts:
    """A judge for which both drafts are as good on the same text: they differ by request, and by nothing else."""

    def __init__(self, dice: np.random.Generator, config: GateConfig) -> None:
        self.dice, self.config, self.alphas, self.judged = dice, config, [], 0

    def log(self, alpha: float) -> None:
        pair = alpha + 0.05 * self.dice.standard_normal(2)
        self.alphas.append(tuple(pair.clip(0.01, 0.99)))

    def held_out(self, since_s: float = 0.0) -> list[SimpleNamespace]:
        return [SimpleNamespace(request_id=str(i), request=str(i), alphas=pair) for i, pair in enumerate(self.alphas)]

    def newest(self, entries: list[SimpleNamespace]) -> list[SimpleNamespace]:
        return entries[-self.config.requests :]

    def exams(self, entries: list[SimpleNamespace]) -> list[SimpleNamespace]:
        return entries

    def verdict(self, candidate: Version, incumbent: Version, exams: list[SimpleNamespace], meanwhile: object):  # type: ignore[no-untyped-def]
        self.judged += 1
        sides = [scores([float(exam.alphas[side]) for exam in exams]) for side in (0, 1)]
        return decide(candidate.name, incumbent.name, Comparison(sides[0], sides[1], COSTS), None, self.config)


def test_equal_drafts_under_a_wandering_acceptance_are_rarely_sent_back(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, target: LanguageModel
) -> None:
    """The text of an hour is harder or easier than the last one's: acceptance wanders with sd .03."""
    config = GateConfig(bootstrap_samples=100)
    settings, runs = replace(settings, gate=config), 20
    first = registry.current()
    assert first is not None
    second = candidate(registry, nearly_the_target(target), target)
    looked = sent_back = 0
    for run in range(runs):
        if registry.current() != registry.get(second.name):
            registry.promote(second.name, "equal")
        dice, served, wander = np.random.default_rng(run), ServedAcceptance(config), 0.0
        keeper = keeper_of(settings, registry, replay, target, served=served)
        keeper._judge = judge = EqualDrafts(dice, config)  # type: ignore[assignment]
        for count in range(1000):
            wander = 0.998 * wander + 0.03 * math.sqrt(1 - 0.998**2) * dice.standard_normal()
            alpha = 0.5 + wander
            version = first if count < 400 else second
            feed(served, version.served_as, "a", 40, int(dice.binomial(40, alpha)))
            if count >= 400 and count % 10 == 0:
                judge.log(alpha)
            if count >= 400 and count % 16 == 0:
                keeper.watch()
                keeper.look_into_suspicion()
        looked += judge.judged > 0
        sent_back += registry.current() != registry.get(second.name)
    assert looked >= 0.4 * runs  # what used to send it back came about
    assert sent_back <= 0.05 * runs


def test_what_a_version_served_before_it_was_promoted_again_does_not_count(settings: OnlineSettings) -> None:
    served = ServedAcceptance(settings.gate)
    for version, accepted in (("old", 6), ("new", 1)):
        for _ in range(40):
            feed(served, version, "a", 10, accepted)
    assert served.regression("new", "old") is not None
    served.appoint("new")
    served.appoint("another")
    assert served.accepted_gain("old") == 40 * (1 - 6)  # what has served nothing gains nothing
    assert served.regression("new", "old") is None
    restarted = ServedAcceptance(settings.gate)
    restarted.recall(served.take_news())
    for again in (served, restarted):
        for _ in range(10):
            feed(again, "new", "a", 10, 6)
        assert again.regression("new", "old") is None
        for _ in range(30):
            feed(again, "new", "a", 10, 1)
        assert again.regression("new", "old") is not None


def test_answers_to_one_request_are_one_witness(
    settings: OnlineSettings,
    registry: VersionRegistry,
    replay: ReplayLog,
    target: LanguageModel,
    small_draft: LanguageModel,
    answer: Answer,
) -> None:
    served = ServedAcceptance(settings.gate)
    feed(served, "one", "a", *[(10, 4), (5, 1)])
    figures = served.figures()["versions"]["one"]
    assert (figures["requests"], figures["tried"], figures["accepted"]) == (1, 15, 5)

    answers = [answer(f"r{i}-{j}", request_id=f"r{i}", index=j, split="held_out") for i in range(3) for j in range(4)]
    replay.append(answers)
    candidate(registry, nearly_the_target(target), target)
    keeper = keeper_of(settings, registry, replay, target)
    assert keeper.judge_newest() is None
    assert keeper.waiting_for == "3 of 4 held-out requests"
    replay.append([answer("r3", split="held_out")])
    verdict = keeper.judge_newest()
    assert verdict is not None
    assert verdict.requests == 4

    shadow = Shadow(target, TargetStates(target), 2)
    exams = [Exam(a.sample(), a.policy, a.request_id) for a in answers[:4]]
    (whole,) = shadow.by_request(small_draft, exams)
    each = shadow.scores(small_draft, exams)
    assert whole.positions == sum(score.positions for score in each) == 80
    assert whole.alpha == pytest.approx(sum(score.alpha for score in each))
    assert whole.tokens == tuple(map(sum, zip(*[score.tokens for score in each], strict=True)))


def keeper_running(
    settings: OnlineSettings,
    registry: VersionRegistry,
    replay: ReplayLog,
    target: LanguageModel,
    when_it_reads: Callable[[Shadow], object],
) -> Gatekeeper:
    """Its shadow calls `when_it_reads` in mid-judgement, after the fifth answer."""
    reads = itertools.count(1)

    def run(work: Callable[[], Score]) -> Score:
        if next(reads) == 5:
            when_it_reads(shadow)
        return work()

    shadow = Shadow(target, TargetStates(target), settings.gate.max_gamma, run)
    return Gatekeeper(settings, registry, replay, shadow)


def test_what_is_promoted_elsewhere_does_not_wait_for_a_judgement(
    settings: OnlineSettings, registry: VersionRegistry, held_out: ReplayLog, target: LanguageModel
) -> None:
    chosen = candidate(registry, nearly_the_target(target), target)
    registry.judged(chosen.name, "inconclusive", {}, "")
    judged = candidate(registry, nearly_the_target(target), target)
    keeper = keeper_running(
        settings, registry, held_out, target, lambda shadow: registry.promote(chosen.name, "by hand, elsewhere")
    )
    verdict = keeper.judge_newest()
    assert verdict is not None
    assert (verdict.decision, verdict.requests) == ("inconclusive", 0)
    assert f"{chosen.name} came into service while it was judged" in verdict.reason
    assert keeper.serving == registry.current() == registry.get(chosen.name)
    assert registry.get(judged.name).status == "inconclusive"


def test_texts_deleted_in_mid_judgement_are_not_judged_on(
    settings: OnlineSettings, registry: VersionRegistry, held_out: ReplayLog, target: LanguageModel
) -> None:
    candidate(registry, nearly_the_target(target), target)
    seen: list[Shadow] = []

    def delete(shadow: Shadow) -> None:
        seen.append(shadow)
        shadow.forget()

    verdict = keeper_running(settings, registry, held_out, target, delete).judge_newest()
    assert verdict is not None
    assert verdict.decision == "inconclusive"
    assert "deleted" in verdict.reason
    assert (seen[0]._known, seen[0].states._known) == ({}, {})


def test_whatever_keeps_a_candidate_from_being_judged_refuses_it(
    settings: OnlineSettings, registry: VersionRegistry, held_out: ReplayLog, target: LanguageModel
) -> None:
    def no_memory(shadow: Shadow) -> None:
        raise torch.OutOfMemoryError("tried to allocate\n20 GiB")

    made = candidate(registry, nearly_the_target(target), target)
    verdict = keeper_running(settings, registry, held_out, target, no_memory).judge_newest()
    assert verdict is not None
    assert verdict.reason == "it cannot be judged: tried to allocate 20 GiB"
    assert registry.get(made.name).status == "refused"


def test_an_offline_set_that_cannot_be_read_keeps_everyone_out(
    settings: OnlineSettings, registry: VersionRegistry, held_out: ReplayLog, target: LanguageModel, tmp_path: Path
) -> None:
    (tmp_path / "data" / "held_out" / "key").mkdir(parents=True)
    (tmp_path / "data" / "prompts.jsonl").write_text("")
    (tmp_path / "data" / "held_out" / "key" / "shard-00000.safetensors").write_bytes(b"no shard")
    offline = replace(settings, adapt=replace(settings.adapt, offline=str(tmp_path / "data")))
    keeper = keeper_of(offline, registry, held_out, target)
    for _ in range(2):
        candidate(registry, nearly_the_target(target), target)
        verdict = keeper.judge_newest()
        assert verdict is not None
        assert verdict.decision == "refused"
        assert "cannot be judged" in verdict.reason


def test_what_was_made_from_a_version_that_was_rolled_back_is_refused(
    settings: OnlineSettings, registry: VersionRegistry, held_out: ReplayLog, target: LanguageModel
) -> None:
    bad = candidate(registry, nearly_the_target(target), target)
    registry.promote(bad.name, "slipped through")
    child = candidate(registry, nearly_the_target(target), target)
    registry.rollback("worse in service")
    verdict = keeper_of(settings, registry, held_out, target).judge_newest()
    assert verdict is not None
    assert verdict.candidate == child.name
    assert verdict.decision == "refused"
    assert f"made from {bad.name}, which was rolled back" in verdict.reason


def test_a_shift_of_traffic_is_no_regression() -> None:
    served = ServedAcceptance(GateConfig(rollback_requests=8, domain_requests=4, bootstrap_samples=200))
    for version, easy, hard in (("old", 40, 8), ("new", 8, 40)):
        for domain, accepted, times in (("easy", 9, easy), ("hard", 2, hard)):
            for i in range(times):
                feed(served, version, domain, 10, accepted + i % 2)
    assert served.regression("new", "old") is None
    for _ in range(40):
        feed(served, "worse", "hard", 10, 0)
    assert "acceptance 0.000" in str(served.regression("worse", "old"))


def test_a_collapse_raises_the_alarm_once() -> None:
    alarms: list[str] = []
    served = ServedAcceptance(GateConfig(collapse=0.5), alarms.append)
    for i in range(200):
        feed(served, "one", "a", 10, 6 if i < 150 else 0)
    assert len(alarms) == 1
    assert "collapsed" in alarms[0]


def feed(served: ServedAcceptance, version: str, domain: str, *answers: int | tuple[int, int]) -> None:
    """A request's answers, each (tried, accepted); of a single one just the two numbers."""
    pairs = [a for a in answers if isinstance(a, tuple)] or [answers]
    served._file([_Open(domain, {version: list(pair)}) for pair in pairs])  # type: ignore[arg-type]


def test_an_exam_is_read_once(target: LanguageModel, small_draft: LanguageModel, answer: Answer) -> None:
    works = []

    def run(work):  # type: ignore[no-untyped-def]
        works.append(work)
        return work()

    shadow = Shadow(target, TargetStates(target), 2, run)
    exams = [Exam(a.sample(), a.policy) for a in (answer("a"), answer("b"))]
    first = shadow.scores(small_draft, exams)
    assert shadow.scores(small_draft, exams) == first
    assert len(works) == 2
