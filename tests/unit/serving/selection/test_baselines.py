"""Simple rules of selection."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from distillspec.errors import ConfigError
from distillspec.serving.base.rows import RowView
from distillspec.serving.selection.base import only
from distillspec.serving.selection.baselines import (
    REMEMBERED,
    ByPromptLength,
    Drawn,
    EpsilonGreedy,
    Fixed,
    LookupElseModel,
)
from distillspec.serving.selection.by_name import make_selection

from .steps import World, parts, row


def test_fixed_is_one_draft_and_the_next_where_that_cannot_draft() -> None:
    selection = Fixed(parts(), draft="b")
    assert selection.choose([row("1/0"), row("2/0", ("a",))]) == {"1/0": "b", "2/0": "a"}
    assert Fixed(parts()).choose([row("1/0")]) == {"1/0": "a"}
    with pytest.raises(ConfigError, match=r"selection_options\.draft=c is no draft; there are a, b"):
        Fixed(parts(), draft="c")


def test_a_lookup_goes_before_the_model() -> None:
    selection = LookupElseModel(parts())
    assert selection.choose([row("1/0", free=("lookup",)), row("2/0")]) == {"1/0": None, "2/0": "a"}
    assert selection.choose([row("1/0", written=1)]) == {"1/0": "a"}


def test_a_source_without_a_model_is_a_member_whether_it_has_something_or_not() -> None:
    own = parts(free=("lookup",))
    selection = Fixed(own, draft="lookup")
    assert selection.choose([row("1/0"), row("2/0", free=("lookup",))]) == {"1/0": "lookup", "2/0": "lookup"}
    assert Fixed(own).choose([row("1/0", free=("lookup",))]) == {"1/0": "a"}
    rows = [row(f"{n}/0") for n in range(60)]
    assert set(Drawn(own).choose(rows).values()) == {"a", "b", "lookup"}
    with pytest.raises(ConfigError, match="there are a, b, lookup"):
        Fixed(own, draft="suffix")


def test_a_row_that_nothing_can_be_drafted_for_has_no_member() -> None:
    (closed,) = [row("1/0", ("a",)).within(0)]
    assert Fixed(parts(("a",), free=("lookup",))).choose([closed]) == {"1/0": None}


def test_a_source_without_a_model_alone_hides_the_others() -> None:
    one = row("1/0", free=("lookup", "suffix"))
    free = ("lookup", "suffix")
    alone = only(one, "suffix", free=free)
    assert [option.source for option in alone.options] == ["suffix"]
    assert [option.source for option in only(one, "b", 0.4, free).options] == ["lookup", "suffix", "b"]
    nothing = only(row("1/0"), "suffix", free=free)
    assert (nothing.limit, nothing.others, nothing.likely) == (0, (), None)


def test_epsilon_greedy_learns_what_a_source_without_a_model_brings() -> None:
    world = World(EpsilonGreedy(parts(("a",), free=("lookup",)), epsilon=0.1), {"a": {"x": 0.2}, "lookup": {"x": 0.8}})
    world.free = ("lookup",)
    for _ in range(100):
        world.serve("x", 20)
    assert world.share("lookup", "x", 60) > 0.8


def test_drawn_ones_stay_and_use_all_drafts() -> None:
    selection, rows = Drawn(parts(seed=3)), [row(f"{n}/0") for n in range(40)]
    chosen = selection.choose(rows)
    assert selection.choose(rows) == chosen
    assert 10 < list(chosen.values()).count("a") < 30


def test_epsilon_greedy_takes_the_best_but_for_a_share() -> None:
    world = World(EpsilonGreedy(parts(), epsilon=0.2), {"a": {"x": 0.2}, "b": {"x": 0.8}})
    for _ in range(200):
        world.serve("x", 20)
    assert 0.82 < world.share("b", "x", 150) < 0.97
    with pytest.raises(ConfigError, match="epsilon=2"):
        EpsilonGreedy(parts(), epsilon=2)


def test_epsilon_greedy_has_those_on_trial_that_were_drawn_another_than_the_best() -> None:
    selection = EpsilonGreedy(parts(), epsilon=0.5)
    world = World(selection, {"a": {"x": 0.2}, "b": {"x": 0.8}})
    for _ in range(20):
        world.serve("x", 20)
    rows = [row(f"{n}/0", domain="x") for n in range(100, 200)]
    chosen = selection.choose(rows)
    assert selection.on_trial == {name for name, source in chosen.items() if source == "a"}
    assert 10 < len(selection.on_trial) < 40, "a quarter: half are drawn, and half of them are the best one"
    assert selection.choose(rows) == chosen
    later = selection.choose([row(name, ("b",), domain="x") for name in chosen])
    assert set(later.values()) == {"b"}
    assert not selection.on_trial, "in place of a draft that cannot draft"


def test_long_prompts_get_the_dear_draft() -> None:
    selection = ByPromptLength(parts(("dear", "a")))
    lengths = {f"{n}/0": 3 + n % 50 for n in range(200)}
    chosen = {
        name: selection.choose([row(name, ("dear", "a"), prompt=range(1, length))])[name]
        for name, length in lengths.items()
    }
    late = [name for name in lengths if int(name[:-2]) >= 100]
    assert all(chosen[name] == ("dear" if lengths[name] >= 30 else "a") for name in late if not 18 < lengths[name] < 30)


def test_rows_whose_draft_is_gone_are_asked_for_once() -> None:
    class Counting(Drawn):
        asked = 0

        def pick(self, row: RowView, drafts: Sequence[str]) -> str:
            self.asked += 1
            return super().pick(row, drafts)

    selection, names = Counting(parts()), ("a", "b", "dear")
    (first,) = selection.choose([row("1/0", names)]).values()
    left = tuple(name for name in names if name != first)
    instead = {selection.choose([row("1/0", left)])["1/0"] for _ in range(20)}
    assert len(instead) == 1
    assert instead <= {*left}
    assert selection.asked == 2
    assert selection.choose([row("1/0", names)]) == {"1/0": first}, "it can draft again"


def test_as_many_prompts_are_remembered_as_are_compared() -> None:
    selection = ByPromptLength(parts(("dear", "a")))
    for number in range(REMEMBERED):
        selection.choose([row(f"short {number}", ("dear", "a"), prompt=range(5))])
    for number in range(REMEMBERED):
        chosen = selection.choose([row(f"long {number}", ("dear", "a"), prompt=range(50 + number % 50))])
    assert selection.choose([row("new", ("dear", "a"), prompt=range(55))]) == {"new": "a"}, "short ones are forgotten"
    assert set(chosen.values()) == {"dear"}


def test_names_and_options_are_checked() -> None:
    assert isinstance(make_selection("random", parts(), {}), Drawn)
    with pytest.raises(ConfigError, match="selection=best is not known; use one of goodput, lbss"):
        make_selection("best", parts(), {})
    with pytest.raises(ConfigError, match="random has no option 'draft'"):
        make_selection("random", parts(), {"draft": "a"})
