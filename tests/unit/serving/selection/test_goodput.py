"""Selection by goodput: it finds the best draft of each kind of request, and follows changes."""

from __future__ import annotations

import pytest

from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.rows import BatchView
from distillspec.serving.selection.goodput import REVIEW, GoodputSelection

from .steps import World, parts, row

EXPERTS = {"a": {"maths": 0.7, "sql": 0.2}, "b": {"maths": 0.25, "sql": 0.75}}


@pytest.mark.parametrize("behind", [False, True])
def test_each_domain_gets_the_draft_that_is_accepted_there(behind: bool) -> None:
    world = World(GoodputSelection(parts()), EXPERTS, behind=behind)
    for _ in range(60):
        world.serve("maths")
        world.serve("sql")
    assert world.share("a", "maths", 40) > 0.9
    assert world.share("b", "sql", 40) > 0.9


def test_without_a_domain_it_is_the_prompt_that_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same two kinds of text, which the caller does not name."""
    words = {"maths": (11, 12, 13, 14, 15), "sql": (31, 32, 33, 34, 35)}

    def unnamed(name: str, drafts: tuple[str, ...], *, written: int, domain: str) -> object:
        return row(name, drafts, written=written, prompt=(1, 2, *words[domain]))

    monkeypatch.setattr("tests.unit.serving.selection.steps.row", unnamed)
    world = World(GoodputSelection(parts()), EXPERTS)
    for _ in range(120):
        world.serve("maths")
        world.serve("sql")
    assert world.share("a", "maths", 40) > 0.85
    assert world.share("b", "sql", 40) > 0.85


def test_a_cheaper_draft_wins_over_one_that_is_accepted_a_little_more_often() -> None:
    world = World(GoodputSelection(parts(("a", "dear"))), {"a": {"x": 0.6}, "dear": {"x": 0.66}})
    for _ in range(60):
        world.serve("x")
    assert world.share("a", "x", 30) > 0.85


def test_without_trials_no_request_gets_a_draft_that_is_expected_to_be_worse() -> None:
    alike = {"a": {"x": 0.5}, "b": {"x": 0.48}}
    careful, curious = (World(GoodputSelection(parts(), tries=tries), alike) for tries in (False, True))
    trials = {careful: 0, curious: 0}
    for world in trials:
        for _ in range(20):
            world.serve("x", 8)  # it ends before its draft is reviewed
            trials[world] += bool(world.selection.on_trial)
    assert trials[careful] == 0
    assert trials[curious] > 0


def test_trials_cost_little_once_much_is_known() -> None:
    """3 % of the tokens a second of the best draft, over many requests."""
    world, best = (
        World(GoodputSelection(parts()), EXPERTS),
        World(GoodputSelection(parts(("a",))), {"a": {"maths": 0.7}}),
    )
    for _ in range(600):
        world.serve("maths", 32)
        best.serve("maths", 32)
    ratio = (world.tokens / world.seconds) / (best.tokens / best.seconds)
    assert ratio > 0.97


def test_a_collapsed_draft_is_left_within_thirty_requests() -> None:
    chances = {"a": {"x": 0.75}, "b": {"x": 0.5}}
    world = World(GoodputSelection(parts()), chances)
    for _ in range(150):
        world.serve("x")
    assert world.share("a", "x", 20) > 0.9
    chances["a"]["x"] = 0.02
    for _ in range(30):
        world.serve("x")
    for _ in range(20):
        world.serve("x")
    assert world.share("b", "x", 20) > 0.9


def test_a_better_version_of_a_draft_is_found_within_two_hundred_requests() -> None:
    chances = {"a": {"x": 0.6}, "b": {"x": 0.3}}
    world = World(GoodputSelection(parts()), chances)
    for _ in range(150):
        world.serve("x")
    assert world.share("a", "x", 50) > 0.9
    chances["b"]["x"] = 0.8
    world.selection.draft_changed(DraftChange("b"))
    for _ in range(200):
        world.serve("x")
    for _ in range(20):
        world.serve("x")
    assert world.share("b", "x", 20) > 0.9


@pytest.mark.parametrize("acceptance", [None, 30.0])
def test_a_collapsed_draft_is_found_again_once_it_is_mended(acceptance: float | None) -> None:
    """Loaded anew, without a word of how good it is, and promoted with its ratio to the old one."""
    chances = {"a": {"x": 0.6}, "b": {"x": 0.02}}
    world = World(GoodputSelection(parts()), chances)
    for _ in range(150):
        world.serve("x")
    assert world.share("a", "x", 50) > 0.9
    chances["b"]["x"] = 0.8
    world.selection.draft_changed(DraftChange("b", acceptance))
    for _ in range(220):
        world.serve("x")
    assert world.share("b", "x", 20) > 0.9


def test_a_trial_is_believed_in_and_a_mended_draft_is_believed_anew() -> None:
    """What is expected of a draft on trial might let it draft nothing, and then nothing is learnt of it."""
    selection, chances = GoodputSelection(parts()), {"a": {"x": 0.7}, "b": {"x": 0.02}}
    world = World(selection, chances)
    for _ in range(60):
        world.serve("x")
    selection.draft_changed(DraftChange("b"))
    trials, others = list[float](), list[float]()
    for number in range(100):
        alone = [row(f"alone {number}/0", domain="x")]
        (chosen,) = selection.choose(alone).values()
        (trials if selection.on_trial else others).append(*selection.beliefs.values())
        assert (chosen == "b") == bool(selection.on_trial)
    assert len(trials) > 5
    assert len(others) > 5
    assert min(trials) > 0.9 * min(others)
    selection.draft_changed(DraftChange("a", 0.3))
    selection.choose(alone)
    (believed,) = selection.beliefs.values()
    assert (believed < 0.5 * min(others)) == (chosen == "a")


def test_a_row_that_nothing_can_draft_for_has_no_draft_and_keeps_its_own() -> None:
    selection = GoodputSelection(parts())
    (chosen,) = selection.choose([row("1/0")]).values()
    resting = row("1/0", written=1)._replace(limit=0, others=())
    assert selection.choose([resting]) == {"1/0": None}
    assert selection.choose([row("1/0", written=2)]) == {"1/0": chosen}


def test_a_running_answer_leaves_a_draft_that_its_own_tokens_are_rejected_of() -> None:
    """What is known of all requests speaks for a, and this one's text against it."""
    chances = {"a": {"x": 0.7}, "b": {"x": 0.5}}
    world = World(GoodputSelection(parts()), chances)
    for _ in range(100):
        world.serve("x")
    chances["a"]["x"] = 0.0
    by = world.serve("x", 200)
    assert by["b"] > by["a"] > 0
    assert by["a"] <= 6 * REVIEW


def test_asked_again_about_one_step_it_answers_alike_and_keeps_a_draft_between_reviews() -> None:
    selection = GoodputSelection(parts())
    rows = [row(f"{number}/0") for number in range(20)]
    first = selection.choose(rows)
    assert selection.choose(rows) == first
    assert len(set(first.values())) == 2, "both are tried, while nothing is known"
    grown = [row(f"{number}/0", written=REVIEW - 1) for number in range(20)]
    assert selection.choose(grown) == first


def test_a_draft_that_cannot_draft_for_a_row_is_not_chosen() -> None:
    selection = GoodputSelection(parts())
    (chosen,) = selection.choose([row("1/0")]).values()
    other = "b" if chosen == "a" else "a"
    assert selection.choose([row("1/0", (other,), written=1)]) == {"1/0": other}
    unable = row("1/0", written=2)._replace(limit=0, others=())
    assert selection.choose([unable]) == {"1/0": None}
    assert BatchView((unable,)).rows[0].limit == 0
