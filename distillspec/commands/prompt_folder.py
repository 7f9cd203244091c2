"""The data folder of a run, with its prompts."""

from __future__ import annotations

from pathlib import Path

from distillspec.config import DataConfig
from distillspec.data.folder import DataFolder, find_data_folder
from distillspec.data.prompts import PromptSet, check_prompts, load_prompts, split_prompts, stable_seed
from distillspec.data.selfprompt import DEFAULT_PROMPTS, write_prompts
from distillspec.errors import ConfigError
from distillspec.generation import make_generator
from distillspec.models import LanguageModel
from distillspec.models.features import check_feature_ids
from distillspec.progress import progress


def prepare_folder(
    config: DataConfig, target: LanguageModel, own: Path, seed: int, trained: frozenset[str] = frozenset()
) -> DataFolder:
    """Return the data folder to use: `data.cache`, or the folder `own` with its prompts written once.

    Args:
        trained: keys of prompts that must not be held out, see `unseen`.

    Raises:
        ConfigError: the cache is no data folder, the prompts cannot be read, answers leave no room for a prompt, or the
            target has no such states.
    """
    _check_room(config, target)
    check_feature_ids(target, config.state_ids or (), "data.state_ids")  # before what may take hours
    if config.cache is not None:
        return find_data_folder(config.cache)
    folder = DataFolder(own)
    if not folder.has_prompts:
        folder.write_prompts(_make_prompts(config, target, folder, seed, trained))
    return folder


def check_sources(config: DataConfig) -> None:
    """Refuse files that do not exist, even where the command does not read them.

    Raises:
        ConfigError: `data.cache` is no data folder, or `data.prompts` no file.
    """
    if config.cache is not None:
        find_data_folder(config.cache)
    else:
        check_prompts(config)


def _make_prompts(
    config: DataConfig, target: LanguageModel, folder: DataFolder, seed: int, trained: frozenset[str]
) -> PromptSet:
    if config.prompts == "selfprompt":
        return _write_prompts(config, target, folder, seed, trained)
    prompts = load_prompts(config, target.text_tokenizer, trained)
    if prompts.dropped_long:
        print(f"left out {prompts.dropped_long} prompts above data.max_prompt_tokens={config.max_prompt_tokens}")
    return prompts


def _write_prompts(
    config: DataConfig, target: LanguageModel, folder: DataFolder, seed: int, trained: frozenset[str]
) -> PromptSet:
    """Have the target write prompts. A draft that knows some gets others, so none need to be reserved."""
    count = (config.num_prompts or DEFAULT_PROMPTS) + config.eval_prompts
    seed = stable_seed(seed, "unseen", *sorted(trained)) if trained else seed
    generator = make_generator(config.generator, target, slots=config.batch_slots)
    with progress(f"{target.name} writes {count} prompts") as line:
        written = write_prompts(
            target, generator, config, seed, folder, lambda usable: line.update(usable / count, f"{usable} of {count}")
        )
    return split_prompts(written, config, trained, reserved=0)


def _check_room(config: DataConfig, target: LanguageModel) -> None:
    limit = target.longest_text
    if limit is not None and config.max_new_tokens >= limit:
        raise ConfigError(
            f"data.max_new_tokens={config.max_new_tokens} leaves no room for a prompt: {target.name} reads at most "
            f"{limit} tokens"
        )
