"""Loading a draft for an engine, and the checks it must pass first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch

from distillspec.errors import ConfigError, is_out_of_memory
from distillspec.models import LanguageModel
from distillspec.models.checkpoint import check_target
from distillspec.models.draft import load_pretrained

log = logging.getLogger(__name__)


def load_draft(path: str | Path, target: LanguageModel, device: torch.device | None = None) -> LanguageModel:
    """Load a draft in the target's dtype and onto a device, None: the target's.

    Raises:
        ConfigError: the folder is no model, or its tokenizer is not the target's.
    """
    return placed(load_pretrained(str(path), target, target.dtype), device or target.device)


def placed(draft: LanguageModel, device: torch.device) -> LanguageModel:
    """Return a draft on a device. What it shares with its target, it has a copy of there."""
    if draft.device == device:
        return draft
    draft.model.to(device)
    return draft if draft.stop_head is None else replace(draft, stop_head=draft.stop_head.to(device))


def device_of_drafts(name: str | None, target: LanguageModel) -> torch.device | None:
    """Return the device of the setting `draft.device`, None for the target's.

    Raises:
        ConfigError: there is no such device, or it is of another kind than the target's.
    """
    if name is None:
        return None
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"draft.device={name} is no device; use one as cuda:1, or leave it out") from error
    if device.type != target.device.type:
        raise ConfigError(f"draft.device={name} is of another kind than {target.device}, where the target is")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if (count := torch.cuda.device_count()) <= (device.index or 0):
            raise ConfigError(f"draft.device={name}: there are {count} CUDA devices, from cuda:0 on")
    return device


def draft_name(path: str | Path) -> str:
    """Return what a pool calls the draft of a folder: its name, or that of the run that it is inside."""
    folder = Path(path).resolve()
    return folder.parent.name if folder.name in ("draft", "best") else folder.name


def draft_names(paths: Sequence[str | Path]) -> list[str]:
    """Return the names of several drafts. Those alike are numbered."""
    names, found = [draft_name(path) for path in paths], list[str]()
    for name in names:
        numbered = (f"{name}-{number}" for number in count(1))
        free = (own for own in numbered if own not in names and own not in found)
        found.append(name if names.count(name) == 1 else next(free))
    return found


def load_drafts(
    paths: str | Path | Sequence[str | Path] | None, target: LanguageModel, device: torch.device | None = None
) -> LanguageModel | dict[str, LanguageModel] | None:
    """Load a draft, or several by name, for a target that they were made for.

    One of several that is refused is left out, and the log says why: the others serve.

    Args:
        device: of the drafts, None: the target's.

    Raises:
        ConfigError: the only draft is refused, or all of several are, or no path is given.
    """
    if paths is None:
        return None
    if isinstance(paths, str | Path):
        check_target(paths, target)
        return load_draft(paths, target, device)
    if not paths:
        raise ConfigError("draft=[] names none; leave it out to serve without one")
    return load_named(dict(zip(draft_names(paths), paths, strict=True)), target, device)


def load_named(
    paths: Mapping[str, str | Path], target: LanguageModel, device: torch.device | None = None
) -> dict[str, LanguageModel]:
    """Load the drafts of a pool by name. See `load_drafts`.

    Raises:
        ConfigError: all of them are refused.
    """

    def load(name: str) -> LanguageModel:
        with refusing_out_of_memory(name, device or target.device):
            check_target(paths[name], target)
            draft = load_draft(paths[name], target, device)
            check_finite(draft)
        return draft

    return accepted(paths, load)


def accepted(names: Iterable[str], take: Callable[[str], LanguageModel]) -> dict[str, LanguageModel]:
    """Return what `take` makes of the drafts of a pool. One that it refuses is left out, and the log says why.

    Raises:
        ConfigError: all of them are refused.
    """
    found, problems = dict[str, LanguageModel](), list[str]()
    for name in names:
        try:
            found[name] = take(name)
        except ConfigError as error:
            problems.append(f"{name}: {error}")
            log.error("the draft %s is refused, and the others serve: %s", name, error)
    if not found:
        raise ConfigError(f"no draft can be used: {'; '.join(problems)}")
    return found


@contextmanager
def refusing_out_of_memory(name: str, device: torch.device, otherwise: str = "") -> Iterator[None]:
    """Turn what there is no memory for into a refusal of the draft `name`. `otherwise`: what then serves."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(f"{name} does not fit into what is left of {device}'s memory{otherwise}") from error


def evaluated(drafts: Mapping[str, LanguageModel]) -> dict[str, float]:
    """Return the acceptance rates that drafts' own runs measured, by name, as far as they are known."""
    return {name: draft.evaluated for name, draft in drafts.items() if draft.evaluated is not None}


def version_of(draft: LanguageModel | None) -> str:
    """Return the draft's short weights hash, "" without a draft."""
    return "" if draft is None else draft.identity.version


def check_finite(draft: LanguageModel) -> None:
    """Refuse a draft with NaN or infinite weights.

    Raises:
        ConfigError: the line names the first such parameter.
    """
    for name, parameter in draft.model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise ConfigError(
                f"the draft {draft.name} has NaN or infinite weights ({name}); train or export it again "
                "(the old draft stays)"
            )
