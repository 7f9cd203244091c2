"""C++ files of this package, built by the machine's own compiler for its own processor, once."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from distillspec.files import private_folder

log = logging.getLogger(__name__)
# DISTILLSPEC_MARCH: another processor's instructions, for tests.
FLAGS = (
    "-std=c++17",
    "-O3",
    f"-march={os.environ.get('DISTILLSPEC_MARCH', 'native')}",
    "-fno-math-errno",
    "-fopenmp",
    "-shared",
    "-fPIC",
)
# For some processors GCC splits chains of fused products into products and sums in some loops, but not in others. A
# token's result would then depend on how many are read beside it. What a compiler does not know is left out.
WHOLE_CHAINS = (
    ("-mtune-ctrl=^avoid_fma_chains,^avoid_fma256_chains,^avoid_fma512_chains",),
    ("-mtune-ctrl=^avoid_fma_chains,^avoid_fma256_chains",),
    (),
)
SOURCES = Path(__file__).parent
FOLDER = "native"  # of built libraries, in the cache
BUILD_S = 600.0  # a build takes a second to a quarter of a minute, on a busy machine much longer


refused: dict[str, str] = {}  # libraries that cannot be had in this process, and why


class NotBuilt(Exception):
    """A file could not be built here, for the reason in the message."""


def cache_folder(part: str) -> Path:
    """Return a folder of what is compiled here. It is still there after a restart of the machine.

    Where it cannot be written, as in containers that run as any user, it is a private one among temporary files.

    Raises:
        OSError: that one cannot be used either.
    """
    try:
        folder = _usual_home() / part
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: this user has no home
        pass
    home = Path(tempfile.gettempdir()) / f"distillspec-{os.geteuid()}"
    if home.is_symlink() or (home.exists() and home.stat().st_uid != os.geteuid()):
        raise PermissionError(f"{home} belongs to another user")
    private_folder(home)
    (home / part).mkdir(exist_ok=True)
    return home / part


def _usual_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distillspec"


def cpp_compiler() -> str | None:
    """Return the C++ compiler, None without one."""
    return next(iter(_compilers()), None)


def _compilers() -> list[str]:
    """Return all C++ compilers, the one to try first first."""
    names = (os.environ.get("CXX", ""), "g++", "clang++")
    return list(dict.fromkeys([path for name in names if (path := shutil.which(name))]))


def library(source: Path, *defined: str) -> ctypes.CDLL:
    """Return the library built of a C++ file, from the cache if this machine has built it before.

    Args:
        defined: macros, as NAME=VALUE.

    Raises:
        NotBuilt: there is no compiler, none takes the file, or the library cannot be written or loaded.
    """
    name = source.name
    try:
        flags = [*FLAGS, *(f"-D{macro}" for macro in defined)]
        ingredients = (*flags, str(WHOLE_CHAINS), _processor(), *_texts(source))
        key = hashlib.sha256("\0".join(ingredients).encode()).hexdigest()[:16]
        name = f"{source.stem}-{key}.so"
        if name in refused:
            raise NotBuilt(refused[name])
        return _loaded(flags, source, name)
    except OSError as error:
        raise _refusal(name, f"{type(error).__name__}: {error}") from error


def _loaded(flags: Sequence[str], source: Path, name: str) -> ctypes.CDLL:
    """Load a library, built before or now. One that is damaged, or of another system, is built again."""
    for folder in _folders():
        if os.path.exists(built := folder / name):  # Path.exists raises where a folder may not be searched
            try:
                return ctypes.CDLL(str(built))
            except OSError as error:
                log.warning("%s cannot be loaded and is built again: %s", built, error)
    built = cache_folder(FOLDER) / name
    _build(flags, source, built)
    return ctypes.CDLL(str(built))


def _folders() -> Iterator[Path]:
    """Yield the folders in which a library may lie. The usual one may be read-only, and filled with an image."""
    with suppress(RuntimeError):
        yield _usual_home() / FOLDER
    yield cache_folder(FOLDER)


def _build(flags: Sequence[str], source: Path, built: Path) -> None:
    """Build a library with the first compiler that takes it.

    It appears whole or not at all, since other processes may build it too.
    """
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        fresh, reasons = Path(folder) / built.name, list[str]()
        for compiler in _compilers():
            log.info("building %s for this processor, once", source.name)
            arguments = [*_known_to(compiler), *flags, str(source), "-o", str(fresh)]
            if (reason := _refused_by(compiler, arguments)) is None:
                with fresh.open("rb") as written:  # a file that is empty after a power cut would be taken for built
                    os.fsync(written.fileno())
                fresh.replace(built)
                return
            reasons.append(reason)
    raise _refusal(built.name, "; ".join(reasons) or "no C++ compiler (g++ 12 or newer)")


@cache
def _known_to(compiler: str) -> tuple[str, ...]:
    """Return the first of `WHOLE_CHAINS` that a compiler knows."""
    empty = [FLAGS[0], "-x", "c++", "-fsyntax-only", os.devnull]
    return next((flags for flags in WHOLE_CHAINS if _refused_by(compiler, [*flags, *empty]) is None), ())


def _refused_by(compiler: str, arguments: Sequence[str]) -> str | None:
    """Return why a compiler built nothing, None if it did."""
    try:
        done = subprocess.run([compiler, *arguments], capture_output=True, text=True, timeout=BUILD_S)
    except subprocess.TimeoutExpired:
        return f"{compiler} took more than {BUILD_S:.0f} s"
    return f"{compiler} failed: {_first_error(done.stderr)}" if done.returncode else None


def _first_error(output: str) -> str:
    """Return the line of a compiler's output that names the error."""
    lines = output.strip().splitlines() or ["no reason given"]
    return next((line for line in lines if "error:" in line), lines[0])


def _refusal(name: str, reason: str) -> NotBuilt:
    """Note that a library cannot be had, so that nobody waits for it again."""
    if reason not in refused.values():  # a missing compiler is named once
        log.warning("%s was not built, and slower code serves: %s", name, reason)
    refused[name] = reason
    return NotBuilt(reason)


def _texts(source: Path) -> list[str]:
    """Return the text of a file and of the headers beside it."""
    return [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]


@cache
def _processor() -> str:
    """Return what tells processors with different instructions apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return " ".join((platform.machine(), platform.processor(), features))
