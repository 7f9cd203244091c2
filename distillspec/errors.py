"""Failures that a command can end in, each a single clear line for the person who ran it."""

import errno


class ConfigError(ValueError):
    """An impossible setting or argument. The message names the value and the fix. Exit code 2."""


class RunError(RuntimeError):
    """A failure outside the configuration (disk, numbers, data) that ends the run. Exit code 1."""


class Terminated(KeyboardInterrupt):
    """SIGTERM without a listener: unwinds like Ctrl-C, so that finished work is saved."""

    signal_number = 15


class Interrupted(Exception):
    """A run stopped by a signal, with its state saved. Exit code 128 + signal number."""

    def __init__(self, signal_number: int, resume_hint: str) -> None:
        super().__init__(resume_hint)
        self.signal_number = signal_number


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if there was no memory for something, on a device or on the host, or if that caused the error."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch takes seconds to import
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:  # a file that is mapped
        return True
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):  # torch's on CPUs
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def in_one_line(error: BaseException, most: int = 160) -> str:
    """Return an error's text in one line of at most `most` characters, as a reason inside another message."""
    return " ".join(str(error).split())[:most]
