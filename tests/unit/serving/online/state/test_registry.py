"""Versions: complete or not there, one serves, and what serves changes in one transaction."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from distillspec.errors import ConfigError, RunError
from distillspec.files import write_folder
from distillspec.models import LanguageModel, save_draft
from distillspec.serving.online.state.layout import REGISTRY
from distillspec.serving.online.state.lock import held
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.state.version import Version
from distillspec.serving.online.state.version_folders import FILLING


def add_changed(registry: VersionRegistry, draft: LanguageModel, target: LanguageModel, by: float) -> Version:
    """A candidate with other weights."""
    with torch.no_grad():
        for parameter in draft.layers.parameters():
            parameter += by
    current = registry.current()
    parent = None if current is None else current.name
    return registry.add(lambda folder: save_draft(draft, folder, target), parent=parent, requests=(1, 9))


def test_a_version_is_a_folder_and_a_row(
    registry: VersionRegistry, small_draft: LanguageModel, target: LanguageModel
) -> None:
    first = registry.current()
    assert first is not None
    second = add_changed(registry, small_draft, target, 0.1)
    assert (second.status, second.parent, second.first_request, second.last_request) == ("candidate", first.name, 1, 9)
    assert second.weights_hash != first.weights_hash
    assert registry.problem_of(second) is None
    assert registry.current() == first  # a candidate does not serve


def test_promotion_retires_the_old_one_and_rollback_brings_it_back(
    registry: VersionRegistry, small_draft: LanguageModel, target: LanguageModel
) -> None:
    first = registry.current()
    assert first is not None
    second = add_changed(registry, small_draft, target, 0.1)
    registry.promote(second.name, "better", expected=first.name)
    assert [v.status for v in registry.versions()] == ["retired", "promoted"]
    assert registry.rollback("worse after all").name == first.name
    assert [v.status for v in registry.versions()] == ["promoted", "rolled_back"]
    assert [p["version"] for p in registry.promotions()] == [first.name, second.name, first.name]
    with pytest.raises(RunError, match="no earlier version"):
        registry.rollback("again")


def test_what_a_version_is_held_against(
    registry: VersionRegistry, small_draft: LanguageModel, target: LanguageModel
) -> None:
    first = registry.current()
    assert first is not None
    assert registry.challenged_by() is None
    second = add_changed(registry, small_draft, target, 0.1)
    registry.promote(second.name, "better")
    third = add_changed(registry, small_draft, target, 0.1)
    assert [version.name for version in registry.lineage(third)] == [second.name, first.name]
    registry.promote(third.name, "better")
    assert registry.challenged_by() == registry.get(second.name)
    registry.rollback("worse after all")
    assert registry.challenged_by() is None  # the second was compared before


def test_clearing_away_spares_what_is_being_written(
    registry: VersionRegistry, small_draft: LanguageModel, target: LanguageModel
) -> None:
    def write(folder: Path) -> None:
        save_draft(small_draft, folder.with_name("made"), target)

        def fill(temporary: Path) -> None:
            shutil.copytree(folder.with_name("made"), temporary, dirs_exist_ok=True)
            (temporary / "sha256.json").unlink()
            registry.clear_away(keep=0)  # the gate, after a verdict

        write_folder(folder, fill)

    added = registry.add(write)
    assert registry.problem_of(added) is None
    assert [path.name for path in registry.folder.iterdir() if path.name.startswith(".")] == []


def test_folders_are_cleared_away_unless_a_process_fills_one(registry: VersionRegistry) -> None:
    """A process id in a name says nothing in another container."""
    folders = [registry.folder / f".incoming-{pid}-0" for pid in (os.getpid(), 999999999)]
    for folder in folders:
        folder.mkdir()
    with held(registry.folder / FILLING, shared=True), held(registry.folder / FILLING, shared=True):
        registry.clear_away(keep=0)
        assert [folder.is_dir() for folder in folders] == [True, True]
    registry.clear_away(keep=0)
    assert [folder.exists() for folder in folders] == [False, False]


def test_a_folder_that_a_crash_left_before_it_was_registered_is_in_nobodys_way(
    registry: VersionRegistry, small_draft: LanguageModel, target: LanguageModel
) -> None:
    first = add_changed(registry, small_draft, target, 0.1)
    with sqlite3.connect(registry.folder / REGISTRY) as rows:
        rows.execute("DELETE FROM versions WHERE name = ?", (first.name,))
    rows.close()
    again = add_changed(registry, small_draft, target, 0.0)
    assert again.name == first.name
    assert registry.problem_of(again) is None


PROMOTE = """
import sys, time
from pathlib import Path
from distillspec.errors import RunError
from distillspec.serving.online.state.registry import VersionRegistry
folder, name, expected, ready, go = sys.argv[1:]
Path(ready).touch()
while not Path(go).exists():
    time.sleep(0.001)
try:
    VersionRegistry(Path(folder)).promote(name, "race", expected=expected)
    print("promoted")
except RunError as error:
    print(error)
"""


def test_of_two_processes_that_promote_at_once_one_succeeds(
    registry: VersionRegistry, small_draft: LanguageModel, target: LanguageModel, tmp_path: Path
) -> None:
    first = registry.current()
    assert first is not None
    rivals = [add_changed(registry, small_draft, target, 0.1) for _ in range(2)]
    ready, go = [tmp_path / f"ready-{rival.name}" for rival in rivals], tmp_path / "go"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROMOTE, str(registry.folder), rival.name, first.name, str(sign), str(go)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rival, sign in zip(rivals, ready, strict=True)
    ]
    while not all(sign.exists() for sign in ready):
        assert all(process.poll() is None for process in processes), "a process ended before it began"
        time.sleep(0.01)
    go.touch()
    said = [process.communicate(timeout=60)[0].strip().splitlines()[-1] for process in processes]
    promoted, refused = sorted(said, key=lambda line: line != "promoted")
    assert promoted == "promoted"
    assert "serves now, not" in refused


def test_a_damaged_promoted_version_is_not_booted(
    registry: VersionRegistry, small_draft: LanguageModel, target: LanguageModel
) -> None:
    first = registry.current()
    second = add_changed(registry, small_draft, target, 0.1)
    registry.promote(second.name, "better")
    weights = second.path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    booted = registry.boot()
    assert booted is not None
    assert first is not None
    assert booted.name == first.name
    with pytest.raises(RunError, match="cannot serve"):
        registry.promote(second.name, "by hand")


def test_an_unfinished_version_leaves_nothing(registry: VersionRegistry) -> None:
    def breaks(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").write_text("x")
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        registry.add(breaks)
    with pytest.raises(RunError, match="not complete"):
        registry.add(lambda folder: folder.mkdir())
    assert len(registry.versions()) == 1
    assert [p.name for p in registry.folder.iterdir() if p.is_dir()] == [registry.versions()[0].name]


def test_clearing_away_keeps_what_may_serve_again(
    registry: VersionRegistry, small_draft: LanguageModel, target: LanguageModel
) -> None:
    first = registry.current()
    second = add_changed(registry, small_draft, target, 0.1)
    registry.promote(second.name, "better")
    refused = [add_changed(registry, small_draft, target, 0.1) for _ in range(2)]
    for version in refused:
        registry.judged(version.name, "refused", {"gain": -1}, "worse")
    (registry.folder / "v99999-stray").mkdir()
    assert registry.clear_away(keep=1) == [refused[0].name]
    there = {p.name for p in registry.folder.iterdir() if p.is_dir()}
    assert first is not None
    assert there == {first.name, second.name, refused[1].name}
    assert registry.get(refused[0].name).verdict == {"gain": -1}  # its row stays
    with pytest.raises(ConfigError, match="is not in"):
        registry.get("v1")


def test_the_draft_that_was_given_is_kept_and_known_whatever_came_after(
    registry: VersionRegistry, small_draft: LanguageModel, target: LanguageModel
) -> None:
    """A start with the same draft goes on with what it has learnt, and a tenant's deletion can go back to it."""
    given = registry.current()
    assert given is not None
    for _ in range(4):
        registry.promote(add_changed(registry, small_draft, target, 0.1).name, "better")
    gone = registry.clear_away(keep=0)
    assert len(gone) == 2
    assert given.name not in gone
    assert registry.problem_of(given) is None
    lost = registry.get(gone[0])
    assert not lost.present
    assert registry.find(lost.weights_hash) == lost, "known by its weights, though its folder is gone"
    assert [version.name for version in registry.versions("promoted")] == [registry.current().name]  # type: ignore[union-attr]


def test_candidates_in_vain_are_counted_since_the_newest_that_was_promoted(
    registry: VersionRegistry, small_draft: LanguageModel, target: LanguageModel
) -> None:
    def in_vain() -> None:
        registry.judged(add_changed(registry, small_draft, target, 0.1).name, "inconclusive", {"gain": 0.0}, "equal")

    in_vain()
    in_vain()
    assert registry.judged_in_vain() == 2
    registry.promote(add_changed(registry, small_draft, target, 0.1).name, "better")
    in_vain()
    assert registry.judged_in_vain() == 1
    registry.rollback("worse")
    assert registry.judged_in_vain() == 1, "those before the promotion are settled"
    registry.clear_away(keep=0)
    registry.disown("a tenant was deleted")
    assert registry.judged_in_vain() == 0, "they are gone"
