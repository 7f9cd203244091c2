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
SOURCES = Path(__file__).parent
BUILD_S = 600.0  # a build takes a second to a quarter of a minute, on a busy machine much longer


_refused: dict[str, str] = {}  # libraries that cannot be had in this process, and why


class NotBuilt(Exception):
    """A file could not be built here, for the reason in the message."""


def cache_home() -> Path:
    """Return the folder of what is compiled here. It is still there after a restart of the machine.

    Where it cannot be written, as in containers that run as any user, it is a private one among temporary files.

    Raises:
        OSError: that one cannot be used either.
    """
    try:
        home = _usual_home()
        home.mkdir(parents=True, exist_ok=True)
        if os.access(home, os.W_OK):
            return home
    except (OSError, RuntimeError):  # RuntimeError: this user has no home
        pass
    home = Path(tempfile.gettempdir()) / f"distillspec-{os.geteuid()}"
    if home.is_symlink() or (home.exists() and home.stat().st_uid != os.geteuid()):
        raise PermissionError(f"{home} belongs to another user")
    private_folder(home)
    return home


def _usual_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distillspec"


def cpp_compiler() -> str | None:
    """Return the C++ compiler, None without one."""
    return next(
        (found for name in (os.environ.get("CXX", ""), "g++", "clang++") if (found := shutil.which(name))), None
    )


def library(source: Path, *defined: str) -> ctypes.CDLL:
    """Return the library built of a C++ file, from the cache if this machine has built it before.

    Args:
        defined: macros, as NAME=VALUE.

    Raises:
        NotBuilt: there is no compiler, it refuses the file, or the library cannot be written or loaded.
    """
    compiler = cpp_compiler()
    if compiler is None:
        raise NotBuilt("no C++ compiler")
    name = source.name
    try:
        command = [compiler, *FLAGS, *(f"-D{macro}" for macro in defined)]
        key = hashlib.sha256("\0".join((*command, _processor(), *_texts(source))).encode()).hexdigest()[:16]
        name = f"{source.stem}-{key}.so"
        if name in _refused:
            raise NotBuilt(_refused[name])
        return _loaded(command, source, name)
    except OSError as error:
        raise _refusal(name, f"{type(error).__name__}: {error}") from error


def _loaded(command: Sequence[str], source: Path, name: str) -> ctypes.CDLL:
    """Load a library, built before or now. One that is damaged, or of another system, is built again."""
    for folder in _homes():
        if (built := folder / "native" / name).exists():
            try:
                return ctypes.CDLL(str(built))
            except OSError as error:
                log.warning("%s cannot be loaded and is built again: %s", built, error)
    built = cache_home() / "native" / name
    _build(command, source, built)
    return ctypes.CDLL(str(built))


def _homes() -> Iterator[Path]:
    """Yield the folders in which a library may lie. The usual one may be read-only, and filled with an image."""
    with suppress(RuntimeError):
        yield _usual_home()
    yield cache_home()


def _build(command: Sequence[str], source: Path, built: Path) -> None:
    """Build a library. It appears whole or not at all, since other processes may build it too."""
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        made = Path(folder) / built.name
        log.info("building %s for this processor, once", source.name)
        try:
            done = subprocess.run(
                [*command, str(source), "-o", str(made)], capture_output=True, text=True, timeout=BUILD_S
            )
        except subprocess.TimeoutExpired:
            raise _refusal(built.name, f"{command[0]} took more than {BUILD_S:.0f} s") from None
        if done.returncode:
            raise _refusal(built.name, f"{command[0]} failed: {_first_error(done.stderr)}")
        with made.open("rb") as written:  # a file that is empty after a power cut would be taken for built
            os.fsync(written.fileno())
        made.replace(built)


def _first_error(told: str) -> str:
    """Return the line of a compiler's output that names the error."""
    lines = told.strip().splitlines() or ["no reason given"]
    return next((line for line in lines if "error:" in line), lines[0])


def _refusal(name: str, reason: str) -> NotBuilt:
    """Note that a library cannot be had, so that nobody waits for it again."""
    _refused[name] = reason
    log.warning("%s was not built, and slower code serves: %s", name, reason)
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
