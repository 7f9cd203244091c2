"""`distill versions` on a real folder: what each action prints, and what it changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from distillspec.config import DraftConfig, TargetConfig
from distillspec.models import LanguageModel, initialise_draft, load_target, save_draft
from distillspec.serving.online.state.layout import Layout
from distillspec.serving.online.state.registry import VersionRegistry

WHERE = "online.folder=online"


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    return load_target(TargetConfig(path="tiny", dtype="float32", device="cpu"))


@pytest.fixture
def registry(tmp_path: Path, target: LanguageModel) -> VersionRegistry:
    """Registry: v3 replaced v1, v2 was refused, v4 and v5 were inconclusive, v6 waits."""
    made = VersionRegistry(Layout(tmp_path / "online").versions)
    for number in range(6):
        draft = initialise_draft(DraftConfig(layers=1), target)
        draft.layers[0].mlp.up_proj.weight.data += 0.01 * number
        before = made.current()
        version = made.add(
            lambda folder, draft=draft: save_draft(draft, folder, target),  # type: ignore[misc]
            parent=None if before is None else before.name,
            requests=(10 * number, 10 * number + 9) if number else None,
        )
        if number in (0, 2):
            made.promote(version.name, ("first draft", "", "better")[number])
            made.judged(version.name, "promoted", {"decision": "promoted"}, ("first draft", "", "better")[number])
        elif number < 5:
            made.judged(version.name, "refused" if number == 1 else "inconclusive", {}, f"because of {number}")
    return made


def statuses(registry: VersionRegistry) -> list[str]:
    return [version.status for version in registry.versions()]


def ended(folder: Path, run: str) -> dict[str, Any]:
    return json.loads((folder / run / "summary.json").read_text())


def lines(printed: str, names: Sequence[str]) -> list[list[str]]:
    """The printed lines that begin with a version's name, in columns."""
    return [line.split(maxsplit=2) for line in printed.splitlines() if line.startswith(tuple(names))]


BEFORE = ["retired", "refused", "promoted", "inconclusive", "inconclusive", "candidate"]


def test_list_and_show_tell_everything_and_change_nothing(
    distill: Any, tmp_path: Path, registry: VersionRegistry
) -> None:
    versions, promotions = registry.versions(), registry.promotions()
    names = [version.name for version in versions]
    listed = distill("versions", WHERE, "hydra.run.dir=listed")
    assert listed.code == 0, listed.err
    printed = lines(listed.out, names)
    assert [words[:2] for words in printed] == [[v.name, v.status] for v in versions]
    assert [v.status for v in versions] == BEFORE
    assert [" ".join(words[2:]).split() for words in printed] == [
        ["first", "draft"],
        ["requests", "10–19", "because", "of", "1"],
        ["requests", "20–29", "better"],
        ["requests", "30–39", "because", "of", "3"],
        ["requests", "40–49", "because", "of", "4"],
        ["requests", "50–59"],
    ]
    assert [v["name"] for v in ended(tmp_path, "listed")["versions"]] == names

    shown = distill("versions", "action=show", f"version={names[2]}", WHERE, "hydra.run.dir=shown")
    assert shown.code == 0, shown.err
    printed = json.loads(shown.out[shown.out.index("{") : shown.out.rindex("}") + 1])
    assert (printed["name"], printed["status"], printed["parent"]) == (names[2], "promoted", names[0])
    assert (printed["first_request"], printed["last_request"]) == (20, 29)
    assert printed["verdict"] == {"decision": "promoted"}
    assert printed["problem"] is None
    assert printed["weights_hash"] == versions[2].weights_hash
    assert printed == {name: value for name, value in ended(tmp_path, "shown").items() if name != "command"}
    (versions[2].path / "model.safetensors").write_bytes(b"cut short")
    damaged = distill("versions", "action=show", f"version={names[2]}", WHERE)
    assert damaged.code == 0, damaged.err
    assert (
        "model.safetensors" in json.loads(damaged.out[damaged.out.index("{") : damaged.out.rindex("}") + 1])["problem"]
    )
    assert (registry.versions(), registry.promotions()) == (versions, promotions)


def test_promote_and_rollback_change_what_serves(distill: Any, tmp_path: Path, registry: VersionRegistry) -> None:
    names = [version.name for version in registry.versions()]
    promoted = distill("versions", "action=promote", f"version={names[5]}", WHERE, "hydra.run.dir=promoted")
    assert promoted.code == 0, promoted.err
    assert [words[:2] for words in lines(promoted.out, names)] == [[names[5], "promoted"]]
    assert ended(tmp_path, "promoted")["serving"] == names[5]
    assert statuses(registry) == ["retired", "refused", "retired", "inconclusive", "inconclusive", "promoted"]
    last = registry.promotions()[-1]
    assert (last["version"], last["previous"], last["reason"]) == (names[5], names[2], "promoted by hand")

    for place, back in enumerate((2, 0)):
        rolled = distill("versions", "action=rollback", WHERE, f"hydra.run.dir=rolled{place}")
        assert rolled.code == 0, rolled.err
        assert [words[:2] for words in lines(rolled.out, names)] == [[names[back], "promoted"]]
        assert ended(tmp_path, f"rolled{place}")["serving"] == names[back]
    assert statuses(registry) == ["promoted", "refused", "rolled_back", "inconclusive", "inconclusive", "rolled_back"]
    assert registry.get(names[2]).reason == "rolled back by hand"
    promotions = registry.promotions()
    none_left = distill("versions", "action=rollback", WHERE)
    assert (none_left.code, none_left.err.count("\n")) == (1, 1), none_left
    assert f"there is no earlier version to go back to from {names[0]}" in none_left.err
    assert registry.promotions() == promotions


def test_a_damaged_version_is_not_promoted(distill: Any, registry: VersionRegistry) -> None:
    names = [version.name for version in registry.versions()]
    (registry.get(names[5]).path / "model.safetensors").write_bytes(b"cut short")
    refused = distill("versions", "action=promote", f"version={names[5]}", WHERE)
    assert (refused.code, refused.err.count("\n")) == (1, 1), refused
    assert f"{names[5]} cannot serve" in refused.err
    assert statuses(registry) == BEFORE


def test_gc_clears_away_what_will_not_serve_again(distill: Any, tmp_path: Path, registry: VersionRegistry) -> None:
    versions = registry.versions()
    names = [version.name for version in versions]
    (registry.folder / ".incoming-999999999-dead").mkdir()  # of a trainer that died
    cleared = distill("versions", "action=gc", "keep=1", WHERE, "hydra.run.dir=cleared")
    assert cleared.code == 0, cleared.err
    assert f"2 folders are cleared away: {names[1]}, {names[3]}\n" in cleared.out
    assert ended(tmp_path, "cleared")["gone"] == [names[1], names[3]]
    # What serves, what a rollback goes back to, what waits to be judged, and the newest of the others.
    assert {path.name for path in registry.folder.iterdir() if path.is_dir()} == {names[i] for i in (0, 2, 4, 5)}
    assert [version.present for version in registry.versions()] == [True, False, True, False, True, True]
    assert statuses(registry) == BEFORE
    again = distill("versions", "action=gc", "keep=1", WHERE)
    assert "0 folders are cleared away: none\n" in again.out
    gone = distill("versions", "action=promote", f"version={names[1]}", WHERE)
    assert gone.code == 1
    assert "is not there" in gone.err
