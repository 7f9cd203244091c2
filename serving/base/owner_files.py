"""Files of what is kept of texts, by owner: a tenant and its cache salt."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from distillspec.errors import RunError
from distillspec.files import private_folder

Owner = tuple[str, str]  # tenant, cache salt
EVERYBODY = ("*", "")  # the owner of what all tenants share


class OwnerFiles:
    """Names of an owner's file in a folder, which this account alone reads. Names are hashes, and hold no tenant's.

    They hold the size of the vocabulary too: ids of another one mean nothing.

    Args:
        ending: of the files. Several kinds may share a folder.

    Raises:
        RunError: the folder cannot be made.
    """

    def __init__(self, folder: Path, vocabulary: int, ending: str) -> None:
        self.folder, self.vocabulary, self.ending = folder, vocabulary, ending
        try:
            private_folder(folder)
        except OSError as error:
            raise RunError(f"folder={folder} cannot be used for answers: {error.strerror}") from error
        if not folder.is_dir():
            raise RunError(f"folder={folder} cannot be used for answers: it is no folder")
        for part in folder.glob(f".*{ending}.*.tmp"):  # of a process that was killed while it wrote
            part.unlink(missing_ok=True)

    def of(self, owner: Owner) -> Path:
        """Return the file of an owner, which may not be there."""
        tenant, salt = owner
        return self.folder / f"{hashed(tenant)}-{hashed(salt)}-{self.vocabulary}{self.ending}"

    def make_room(self, most: int) -> None:
        """Remove files where there are `most` already: of the tenant that has most, the oldest. Raises OSError."""
        files = list(self.folder.glob(f"*{self.ending}"))
        if len(files) >= most:
            files.sort(key=lambda file: file.stat().st_mtime)
        while len(files) >= most:
            files.pop(first_of_most([_tenant(file) for file in files])).unlink()


def delete_files(folder: Path, tenant: str, ending: str = "") -> None:
    """Remove all files of a tenant (with this ending) from a folder, half-written ones too. Raises OSError."""
    patterns = (f"{hashed(tenant)}-*{ending}", f".{hashed(tenant)}-*.tmp")
    for file in [file for pattern in patterns for file in folder.glob(pattern)]:
        file.unlink(missing_ok=True)


def first_of_most(tenants: Sequence[str]) -> int:
    """Return the place of the first thing of a tenant that has the most: where there are too many, it gives way."""
    counts = Counter(tenants)
    most = max(counts.values())
    return next(place for place, tenant in enumerate(tenants) if counts[tenant] == most)


def _tenant(file: Path) -> str:
    return file.name.split("-", 1)[0]


def hashed(name: str) -> str:
    """Return a name that stands for another, a tenant's above all, where that may not be written down."""
    return hashlib.sha256(name.encode()).hexdigest()[:24]
