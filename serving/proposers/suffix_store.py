"""Finished answers by tenant, for proposals that need no model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distillspec.errors import ConfigError
from distillspec.serving.base.owner_files import EVERYBODY, Owner
from distillspec.serving.proposers.answer_files import AnswerFiles
from distillspec.serving.proposers.suffix_index import LONGEST, SuffixIndex
from distillspec.serving.proposers.tenant_tables import TenantTables

log = logging.getLogger(__name__)


@dataclass
class _OwnerTexts:
    """An owner's texts in memory."""

    index: SuffixIndex
    appended: int = 0  # tokens since its file was cut


class SuffixStore:
    """Texts of each tenant and cache salt: the end of a prompt and its answer.

    A folder that fails is logged, and the texts stay in memory.

    Args:
        tokens: the most tokens of an owner. Older texts give way. Memory holds the owners served last (`OWNERS`), a
            folder those that wrote last (`FILES`).
        vocabulary: ids are below it.
        shared: one store for all. What one tenant was answered may then be proposed to another: it changes no output,
            but what is proposed can be seen from response times.
        folder: keeps the texts. None: memory alone.
        exclude: tenants of which nothing is kept.
        merge: folders of other stores, such as those of a server's replicas. Their texts are read too, each owner's at
            its first use. This store deletes there, and writes nothing.

    Raises:
        ConfigError: `tokens` is too small, or there is something to merge and no folder.
        RunError: the folder cannot be used.
    """

    def __init__(
        self,
        tokens: int,
        vocabulary: int,
        *,
        shared: bool = False,
        folder: str | None = None,
        exclude: Sequence[str] = (),
        merge: Sequence[str] = (),
    ) -> None:
        if tokens < 2 * LONGEST:
            raise ConfigError(f"proposer_options.tokens={tokens} must be at least {2 * LONGEST}")
        if merge and folder is None:
            raise ConfigError(f"proposer_options.merge={list(merge)} needs folder=FOLDER, for the answers of this one")
        self.tokens, self.shared, self.exclude = tokens, shared, frozenset(exclude)
        self._files = None if folder is None else AnswerFiles(Path(folder), vocabulary, list(map(Path, merge)))
        self._tables = TenantTables[_OwnerTexts](self._read)

    def keep_in(self, folder: Path, vocabulary: int) -> None:
        """Keep the texts of owners in a folder from their next use on, if the store has none yet.

        Raises:
            RunError: the folder cannot be used.
        """
        if self._files is None:
            self._files = AnswerFiles(folder, vocabulary)

    def index(self, owner: Owner) -> SuffixIndex:
        """Return an owner's texts, read from the folder at first."""
        return self._of(owner).index

    def serve(self, sequences: int) -> None:
        """See `TenantTables.serve`."""
        self._tables.serve(sequences)

    def add(self, owner: Owner, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Take in a finished answer."""
        if owner[0] in self.exclude:
            return
        text = [*prompt[-LONGEST:], *answer]
        texts = self._of(owner)
        texts.index.add(text)
        if self._files is None:
            return
        owner = EVERYBODY if self.shared else owner
        try:
            self._files.append(owner, text)
        except OSError:
            log.exception("an answer is not kept on disk")
        texts.appended += len(text)
        if texts.appended > self.tokens:
            texts.appended = 0
            self._texts_on_disk(owner)

    def forget(self, tenant: str) -> None:
        """Delete a tenant's texts, in memory and on disk. In a shared store they cannot be told apart: all go.

        On disk both are deleted: the store may have been shared before, or not.

        Raises:
            OSError: a file stays.
        """
        self._tables.forget(EVERYBODY[0] if self.shared else tenant)
        if self._files is not None:
            for owner in (tenant, EVERYBODY[0]):
                self._files.delete(owner)

    def _of(self, owner: Owner) -> _OwnerTexts:
        return self._tables.of(EVERYBODY if self.shared else owner)

    def _read(self, owner: Owner) -> _OwnerTexts:
        texts = _OwnerTexts(SuffixIndex(self.tokens))
        for text in self._texts_on_disk(owner):
            texts.index.add(text)
        return texts

    def _texts_on_disk(self, owner: Owner) -> list[list[int]]:
        """Return an owner's texts on disk, and cut its file to the newest."""
        if self._files is None or owner[0] in self.exclude:
            return []
        try:
            return self._files.read(owner, self.tokens)
        except OSError:
            log.exception("answers on disk cannot be read")
            return []
