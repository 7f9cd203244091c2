"""The two failures a command can end in, each a single clear line for the person who ran it."""


class ConfigError(ValueError):
    """The user asked for something impossible; names the value and the fix. Exit code 2."""


class RunError(RuntimeError):
    """The run could not go on for a reason outside the configuration (disk, numbers, data). Exit code 1."""


class Terminated(KeyboardInterrupt):
    """SIGTERM where nothing listens for it: unwinds like Ctrl-C, so that finished work is saved."""

    signal_number = 15


class Interrupted(Exception):
    """A signal asked the run to stop and its state is saved. Exit code 128 + signal number."""

    def __init__(self, signal_number: int, resume_hint: str) -> None:
        super().__init__(resume_hint)
        self.signal_number = signal_number


def in_one_line(error: BaseException, most: int = 160) -> str:
    """What an error says, its lines joined, at most so many characters: for a reason inside another message."""
    return " ".join(str(error).split())[:most]
