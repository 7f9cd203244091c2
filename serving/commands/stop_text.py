"""Answers that teach a draft's stop network: of a training run, or of the log of a server that learns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from distillspec.commands.own_runs import find_runs
from distillspec.commands.samples import in_prompt_order
from distillspec.config import StopConfig
from distillspec.data.folder import find_data_folder
from distillspec.data.prompts import prompt_key
from distillspec.data.signal_check import read_checked
from distillspec.data.trained_prompts import trained_prompts
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.serving.online.log.records import LogKey
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import Layout
from distillspec.types import Sample

JUDGING = 5  # one of so many answers judges, of a log one of so many conversations


@dataclass(frozen=True)
class StopText:
    """Answers of the target that teach, others that judge, and whether these taught the draft itself."""

    learning: list[Sample]
    judging: list[Sample]
    taught_draft: bool


def find_text(config: StopConfig, target: LanguageModel, draft: LanguageModel, path: Path) -> StopText:
    """Return the answers that `stop.text` names, or those of the run that made the draft.

    Args:
        path: of the draft.

    Raises:
        ConfigError: they are of fewer than two conversations, or another target's, or none is named and the draft has
            no run.
    """
    if config.text is not None and _has_log(config.text):
        try:
            return _logged(config, target, draft, Layout(Path(config.text)))
        except ConfigError as error:
            raise ConfigError(f"stop.text={config.text}: {error}") from error
    runs = find_runs([path])
    if config.text is None and not runs:
        raise ConfigError(
            f"{path} has no training run beside it; name a run with text, or an online.folder: stop.text=RUN"
        )
    data = runs[0].data if config.text is None else find_data_folder(config.text, "stop.text")
    samples = read_checked(data.samples, target, f"stop.text={data.root}")
    written = [sample for sample in samples if sample.source == "teacher" and sample.response_ids]
    answers = in_prompt_order(written, data.read_prompts().train)[: config.answers]
    taught = any(run.data.root.resolve() == data.root.resolve() for run in runs)
    return _split(answers, range(len(answers)), taught, data.root)


def _has_log(folder: str) -> bool:
    """Return True for the `online.folder` of a server."""
    try:
        return Layout(Path(folder)).manifest.is_file()
    except PermissionError as error:
        raise ConfigError(f"stop.text={folder} cannot be read: no permission for {error.filename}") from error


def _logged(config: StopConfig, target: LanguageModel, draft: LanguageModel, layout: Layout) -> StopText:
    """Return the newest answers of a server's log, as they came."""
    layout.check_usable()
    with closing(ReplayLog(layout.replay)) as replay:
        replay.manifest.agree(LogKey.of(target.identity, replay.key.entries))
        found = replay.by_number(entries := replay.entries()[-config.answers :])
    # A conversation's further turns repeat its text, and so do repeated prompts: they judge nothing that they taught.
    conversations = {entry.number: entry.conversation for entry in entries}
    answers = {number: answer.sample() for number, answer in found.items() if len(answer)}
    order = {conversation: place for place, conversation in enumerate(dict.fromkeys(conversations[n] for n in answers))}
    text = _split(list(answers.values()), [order[conversations[n]] for n in answers], False, layout.root)
    known = trained_prompts(draft.lineage)
    return replace(text, taught_draft=any(prompt_key(answer.prompt_ids) in known for answer in text.judging))


def _split(answers: Sequence[Sample], groups: Sequence[int], taught_draft: bool, root: Path) -> StopText:
    """Let whole groups of answers judge."""
    pairs = list(zip(answers, groups, strict=True))
    text = StopText(
        [a for a, group in pairs if group % JUDGING], [a for a, g in pairs if g % JUDGING == 0], taught_draft
    )
    if not text.learning or not text.judging:
        raise ConfigError(
            f"{root} has {len(answers)} answers of the target in {len(set(groups))} conversations, and two of these "
            "are needed; name another run: stop.text=RUN"
        )
    return text
