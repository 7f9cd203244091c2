"""C++ files are built once, whole or not at all, and failures say why."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from distillspec.native.library import NotBuilt, cache_folder, cpp_compiler, library

needs_compiler = pytest.mark.skipif(cpp_compiler() is None, reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder("native")


def readable(path: Any, mode: int) -> bool:
    """Say what any other user may do: root may write everywhere."""
    return mode != os.W_OK and Path(path).exists()


def source(folder: Path, answer: int) -> Path:
    made = folder / "answer.cpp"
    made.write_text(f'extern "C" int answer() {{ return {answer}; }}')
    return made


@needs_compiler
def test_a_file_is_built_once_and_again_when_it_changes(tmp_path: Path, own_cache: Path) -> None:
    assert library(source(tmp_path, 41)).answer() == 41
    (built,) = own_cache.iterdir()
    changed = built.stat().st_mtime_ns
    assert library(source(tmp_path, 41)).answer() == 41
    assert built.stat().st_mtime_ns == changed
    assert library(source(tmp_path, 42)).answer() == 42
    assert len(list(own_cache.iterdir())) == 2


@needs_compiler
def test_a_file_is_built_again_when_a_header_beside_it_changes(tmp_path: Path) -> None:
    (tmp_path / "given.h").write_text("constexpr int GIVEN = 1;")
    made = tmp_path / "answer.cpp"
    made.write_text('#include "given.h"\nextern "C" int answer() { return GIVEN; }')
    assert library(made).answer() == 1
    (tmp_path / "given.h").write_text("constexpr int GIVEN = 2;")
    assert library(made).answer() == 2


@needs_compiler
def test_a_file_is_built_for_each_value_of_a_macro(tmp_path: Path, own_cache: Path) -> None:
    made = tmp_path / "answer.cpp"
    made.write_text('extern "C" int answer() { return GIVEN; }')
    assert [library(made, f"GIVEN={given}").answer() for given in (1, 2, 1)] == [1, 2, 1]
    assert len(list(own_cache.iterdir())) == 2


@needs_compiler
def test_a_file_that_is_refused_leaves_nothing(tmp_path: Path, own_cache: Path) -> None:
    wrong = tmp_path / "wrong.cpp"
    wrong.write_text("int answer( {")
    with pytest.raises(NotBuilt, match=r"wrong\.cpp") as found:
        library(wrong)
    assert "\n" not in str(found.value)
    assert list(own_cache.iterdir()) == []


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What was built before, as in an image, is used. Else one warning says so."""
    monkeypatch.setattr("distillspec.native.library.refused", {})  # as in a process that has looked for none yet
    built = library(source(tmp_path, 1)).answer() if cpp_compiler() else None
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert built is None or library(source(tmp_path, 1)).answer() == 1
    for answer in (102, 103):
        with pytest.raises(NotBuilt, match=r"no C\+\+ compiler"):
            library(source(tmp_path, answer))
    assert len([record for record in caplog.records if "slower code serves" in record.message]) == 1


@needs_compiler
def test_a_compiler_that_refuses_a_file_is_not_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\necho 'error: unknown language' >&2\nexit 1\n")
    other.chmod(0o755)
    monkeypatch.setenv("CXX", str(other))
    assert library(source(tmp_path, 9)).answer() == 9


@needs_compiler
@pytest.mark.parametrize("blocked", ["cache", "cache/distillspec/native"])
def test_a_cache_of_another_user_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path, blocked: str
) -> None:
    """Its folder may not be searched, or the one of libraries is not ours to write."""
    own_cache.mkdir(parents=True, exist_ok=True)

    def stat(path: Any, *given: Any, **named: Any) -> os.stat_result:
        if str(path).startswith(str(tmp_path / "cache" / "distillspec")) and blocked == "cache":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *given, **named)

    def access(path: Any, mode: int) -> bool:
        return not (mode == os.W_OK and Path(path) == own_cache)

    real = os.stat
    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(os, "access", access)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert library(source(tmp_path, 5)).answer() == 5
    assert list(tmp_path.glob("distillspec-*/native/*.so"))


@needs_compiler
def test_a_cache_that_cannot_be_written_is_among_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert library(source(tmp_path, 1)).answer() == 1
    (home,) = tmp_path.glob("distillspec-*")
    assert home.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(tempfile, "tempdir", str(blocked))
    with pytest.raises(NotBuilt, match="NotADirectoryError"):
        library(source(tmp_path, 2))


@needs_compiler
def test_a_damaged_library_is_built_again(tmp_path: Path, own_cache: Path) -> None:
    library(source(tmp_path, 41))
    (built,) = own_cache.iterdir()
    built.unlink()  # a new file: the old one is still loaded
    built.write_bytes(b"")
    assert library(source(tmp_path, 41)).answer() == 41


@needs_compiler
def test_a_refusal_names_the_error(tmp_path: Path) -> None:
    (tmp_path / "given.h").write_text("typedef Unknown Given;")
    wrong = tmp_path / "wrong.cpp"
    wrong.write_text('#include "given.h"\n')
    with pytest.raises(NotBuilt, match=r"error: .Unknown."):
        library(wrong)


@needs_compiler
def test_a_cache_that_was_filled_before_is_used_though_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    library(source(tmp_path, 41))
    monkeypatch.setattr(os, "access", readable)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert library(source(tmp_path, 41)).answer() == 41
    assert not list(tmp_path.glob("distillspec-*/native/*"))


@needs_compiler
def test_a_temporary_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir(mode=0o755)
    (tmp_path / f"distillspec-{os.geteuid()}").symlink_to(tmp_path / "theirs")
    monkeypatch.setattr(os, "access", readable)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(NotBuilt, match="belongs to another user"):
        library(source(tmp_path, 7))
    assert (tmp_path / "theirs").stat().st_mode & 0o777 == 0o755, "nothing of theirs is changed"


@needs_compiler
def test_what_cannot_be_loaded_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache on a disk that nothing may be run from."""
    builds = []
    run = subprocess.run

    def counted(*given: Any, **named: Any) -> Any:
        builds.extend(given[0][:1] if "-shared" in given[0] else ())  # options are tried before
        return run(*given, **named)

    def refused(_: str) -> None:
        raise OSError("failed to map segment from shared object")

    monkeypatch.setattr(subprocess, "run", counted)
    monkeypatch.setattr(ctypes, "CDLL", refused)
    for _ in range(3):
        with pytest.raises(NotBuilt, match="failed to map segment"):
            library(source(tmp_path, 8))
    assert len(builds) == 1
