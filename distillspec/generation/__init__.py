"""Writing text with models: the Hugging Face implementation of `distillspec.types.Generator`, and the choice of one."""

from __future__ import annotations

from collections.abc import Callable

from distillspec.errors import ConfigError
from distillspec.generation.slots import SlotGenerator
from distillspec.models import LanguageModel
from distillspec.types import Generator

# (writer, slots, source, draft, speculation length) → a generator. `distillspec.cli` adds the engine's.
MakeGenerator = Callable[[LanguageModel, int, str, LanguageModel | None, int], Generator]
GENERATORS: dict[str, MakeGenerator] = {
    "slots": lambda writer, slots, source, draft, length: SlotGenerator(writer, slots=slots, source=source),
}


def make_generator(
    name: str,
    writer: LanguageModel,
    *,
    slots: int,
    source: str = "teacher",
    draft: LanguageModel | None = None,
    speculation_length: int = 0,
) -> Generator:
    """The generator called `name` with `writer`; one that speculates may draft with `draft`.

    Raises:
        ConfigError: nobody has registered the name in this process.
    """
    if name not in GENERATORS:
        raise ConfigError(
            f"data.generator={name} is not available here; use {', '.join(GENERATORS)} (or launcher=local)"
        )
    return GENERATORS[name](writer, slots, source, draft, speculation_length)


__all__ = ["GENERATORS", "SlotGenerator", "make_generator"]
