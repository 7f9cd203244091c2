"""Files by owner: names that tell nothing, modes, and what gives way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distillspec.errors import RunError
from distillspec.serving.base.owner_files import OwnerFiles, delete_files


def test_a_file_is_an_owners_and_its_name_holds_no_tenant(tmp_path: Path) -> None:
    files = OwnerFiles(tmp_path / "answers", 50, ".kept")
    owners = [("alice", ""), ("alice", "salt"), ("bob", "")]
    found = [files.of(owner) for owner in owners]
    assert len(set(found)) == 3
    assert OwnerFiles(tmp_path / "answers", 60, ".kept").of(owners[0]) not in found
    assert not any("alice" in file.name or "salt" in file.name for file in found)
    assert (tmp_path / "answers").stat().st_mode & 0o777 == 0o700


def test_a_deletion_takes_all_files_of_a_tenant_and_no_other(tmp_path: Path) -> None:
    kinds = [OwnerFiles(tmp_path, 50, ending) for ending in (".one", ".two")]
    for files in kinds:
        for owner in (("alice", ""), ("alice", "salt"), ("bob", "")):
            files.of(owner).write_bytes(b"kept")
    left = kinds[0].of(("alice", ""))
    (tmp_path / f".{left.name}.77.tmp").write_bytes(b"half")
    delete_files(tmp_path, "alice", ".one")
    assert len(list(tmp_path.iterdir())) == 4
    delete_files(tmp_path, "alice")
    assert sorted(tmp_path.iterdir()) == sorted(files.of(("bob", "")) for files in kinds)
    delete_files(tmp_path / "never made", "alice")


def test_the_tenant_with_the_most_files_gives_way_its_oldest_first(tmp_path: Path) -> None:
    files = OwnerFiles(tmp_path, 50, ".kept")
    owners = [("bob", ""), *[("alice", str(place)) for place in range(3)]]
    for age, owner in enumerate(owners):
        files.of(owner).write_bytes(b"kept")
        os.utime(files.of(owner), (age, age))
    files.make_room(4)
    assert {owner for owner in owners if not files.of(owner).exists()} == {("alice", "0")}


def test_what_a_killed_process_left_is_swept_and_a_file_is_no_folder(tmp_path: Path) -> None:
    half = tmp_path / ".abc.kept.77.tmp"
    half.write_bytes(b"half")
    OwnerFiles(tmp_path, 50, ".kept")
    assert not half.exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be used for answers"):
        OwnerFiles(tmp_path / "file", 50, ".kept")
