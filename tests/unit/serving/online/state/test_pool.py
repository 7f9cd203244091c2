"""The list of a pool's drafts, and versions of each of them."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from distillspec.models import LanguageModel, save_draft
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.pool import Member
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.state.version import ONLY, Version


@pytest.fixture
def empty(settings: OnlineSettings) -> VersionRegistry:
    return VersionRegistry(settings.layout.versions)


def added(registry: VersionRegistry, draft: LanguageModel, target: LanguageModel) -> Version:
    return registry.add(lambda folder: save_draft(draft, folder, target), requests=(1, 2))


def test_each_draft_has_its_own_line_of_versions(
    empty: VersionRegistry, small_draft: LanguageModel, target: LanguageModel
) -> None:
    a, b = empty.of("a"), empty.of("b")
    first, second, third = (added(own, small_draft, target) for own in (a, b, a))
    assert len({first.name, second.name, third.name}) == 3
    assert [version.name for version in a.versions()] == [first.name, third.name]
    assert (first.member, second.member) == ("a", "b")
    a.promote(first.name, "first")
    b.promote(second.name, "first")
    a.promote(third.name, "better")
    assert (a.current(), b.current()) == (a.get(third.name), b.get(second.name))
    assert a.rollback("worse").name == first.name
    assert (b.current() or third).name == second.name
    assert b.predecessor() is None
    assert (a.judged_in_vain(), empty.current(), empty.versions()) == (0, None, [])
    assert sorted(empty.present()) == sorted([first.name, second.name, third.name])


def test_clearing_away_leaves_the_other_drafts_folders(
    empty: VersionRegistry, small_draft: LanguageModel, target: LanguageModel
) -> None:
    a, b = empty.of("a"), empty.of("b")
    made = [added(a, small_draft, target) for _ in range(3)]
    other = added(b, small_draft, target)
    for version in made:
        a.promote(version.name, "by hand")
    assert a.clear_away(0) == [made[0].name]  # the predecessor and the one in service stay
    assert other.path.is_dir()


def test_members_are_listed_once_in_order(empty: VersionRegistry) -> None:
    pool = empty.pool
    assert (pool.members(), pool.learning()) == ([], [Member(ONLY)])
    for member in (Member("b"), Member("a"), Member("a", "on trial", "x", "b")):
        pool.add(member)
    assert pool.members() == [Member("b"), Member("a")]
    pool.set_status("b", "withdrawn", "why")
    assert pool.members()[0] == Member("b", "withdrawn", reason="why")
    assert [member.name for member in pool.learning()] == ["a"]


def test_a_version_counts_for_the_first_draft_that_serves_it(
    empty: VersionRegistry, small_draft: LanguageModel, target: LanguageModel
) -> None:
    version = added(empty.of("a"), small_draft, target)
    added(empty.of("clone"), small_draft, target)
    empty.pool.add(Member("a"))
    empty.pool.add(Member("clone"))
    assert empty.pool.served_by() == {version.served_as: "a"}


def test_a_registry_of_one_draft_is_read_on(
    empty: VersionRegistry, small_draft: LanguageModel, target: LanguageModel
) -> None:
    version = added(empty, small_draft, target)
    empty.promote(version.name, "first")
    empty.close()
    with closing(sqlite3.connect(empty.folder / "registry.sqlite")) as old, old:  # as releases before pools wrote it
        for table in ("versions", "promotions"):
            old.execute(f"ALTER TABLE {table} DROP COLUMN member")
        old.execute("DROP TABLE members")
    again = VersionRegistry(empty.folder)
    assert (again.current() or again).name == version.name  # type: ignore[union-attr]
    assert again.pool.members() == []
