"""Finished answers by tenant, for proposals that need no model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from distillspec.errors import ConfigError, RunError
from distillspec.serving.proposers.answer_files import AnswerFiles
from distillspec.serving.proposers.suffix_index import LONGEST, SuffixIndex

log = logging.getLogger(__name__)

EVERYBODY = "*"  # the tenant of a shared store


class SuffixStore:
    """Texts of each tenant, behind the end of its prompts.

    Args:
        tokens: the most tokens of a tenant. Older texts give way.
        shared: one store for all tenants. What one of them wrote may then be proposed to another: it changes no output,
            but what is proposed can be seen from response times.
        folder: keeps the texts. None: memory alone.

    Raises:
        ConfigError: a setting is impossible.
        RunError: the folder cannot be used.
    """

    def __init__(self, tokens: int = 400_000, *, shared: bool = False, folder: str | None = None) -> None:
        if tokens < 2 * LONGEST:
            raise ConfigError(f"proposer_options.tokens={tokens} must be at least {2 * LONGEST}")
        self.tokens, self.shared = tokens, shared
        self._files = None if folder is None else AnswerFiles(Path(folder))
        self._indices: dict[str, SuffixIndex] = {}

    def index(self, tenant: str) -> SuffixIndex:
        """Return a tenant's texts, read from the folder at first."""
        name = self._name(tenant)
        if name not in self._indices:
            index = self._indices[name] = SuffixIndex(self.tokens)
            for text in [] if self._files is None else self._files.read(name, self.tokens):
                index.add(text)
        return self._indices[name]

    def add(self, tenant: str, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Take in a finished answer. A folder that fails is given up: the texts stay in memory."""
        text = [*prompt[-LONGEST:], *answer]
        self.index(tenant).add(text)
        if self._files is not None:
            try:
                self._files.append(self._name(tenant), text)
            except RunError:
                log.exception("answers are no longer kept on disk")
                self._files = None

    def forget(self, tenant: str) -> None:
        """Delete a tenant's texts, in memory and on disk. In a shared store they cannot be told apart: all go."""
        name = self._name(tenant)
        self._indices.pop(name, None)
        if self._files is not None:
            self._files.delete(name)

    def _name(self, tenant: str) -> str:
        return EVERYBODY if self.shared else tenant
