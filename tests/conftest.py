"""What every test runs under: no network, no writes to the user's home, fixed seeds."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

gc.disable()  # until all is imported
_scratch = tempfile.mkdtemp(prefix="distillspec-tests-")
atexit.register(shutil.rmtree, _scratch, ignore_errors=True)

# Libraries read these when they are imported, so they are set before any test module is; child processes
# of the tests inherit them.
os.environ.update(
    HF_HOME=_scratch,
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
    # Threads only wait for each other in models this small: on busy cores two were 20 times slower than one.
    # Results may not depend on it: set it outside to see.
    OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"),
    # Tests that need two threads run beside another test: threads that wait without sleeping took 25 times as long.
    OMP_WAIT_POLICY="passive",
    WANDB_MODE="offline",
    WANDB_SILENT="true",
    WANDB_DIR=_scratch,
    WANDB_CACHE_DIR=_scratch,
    WANDB_CONFIG_DIR=_scratch,
    WANDB_DATA_DIR=_scratch,
    # Triton's kernels run on the CPU; it reads this at its first import, which may be torch's.
    **({} if shutil.which("nvidia-smi") else {"TRITON_INTERPRET": "1"}),
    MPLBACKEND="Agg",
    MPLCONFIGDIR=_scratch,
)

import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

# Timings on shared machines say nothing, and a failure must repeat for the next person who runs it.
settings.register_profile("distillspec", deadline=None, derandomize=True, database=None)
settings.load_profile("distillspec")


LONG_S = 900  # for a test marked `long` with its fixtures. The general limit is in pyproject.toml


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin files with a test marked `long` first, so that several processes that take file by file end together.

    On a busy machine these tests take several times as long: they have more time than the general limit.
    """
    long = [item for item in items if item.get_closest_marker("long")]
    for item in long:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LONG_S))
    paths = {item.path for item in long}
    items.sort(key=lambda item: item.path not in paths)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what lives to the end: it would look at a million objects again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_handlers_left() -> Iterator[None]:
    """Commands that run in this process (Hydra) leave handlers on streams that pytest closes."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for handler in [one for one in root.handlers if one not in before and type(one).__module__ == "logging"]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)
