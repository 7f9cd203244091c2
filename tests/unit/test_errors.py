"""What counts as a lack of memory."""

from __future__ import annotations

import errno

import pytest
import torch

from distillspec.errors import ConfigError, RunError, is_out_of_memory


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (_caused(ConfigError("it does not fit"), torch.OutOfMemoryError("CUDA out of memory")), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (_caused(RunError("the disk is full"), OSError(errno.ENOSPC, "No space left on device")), False),
        (RuntimeError("shapes do not match"), False),
    ],
)
def test_a_lack_of_memory_is_told_from_other_errors(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) == expected
