"""Generators of text: the Hugging Face implementation of `distillspec.types.Generator`, and generators by name."""

from __future__ import annotations

from collections.abc import Callable

from distillspec.errors import ConfigError
from distillspec.generation.slots import SlotGenerator
from distillspec.models import LanguageModel
from distillspec.types import NO_STATES, Generator, StateRequest

# (writer, slots, source, draft, states) → a generator. `distillspec.cli` adds the engine's, with the run's settings.
MakeGenerator = Callable[[LanguageModel, int, str, LanguageModel | None, StateRequest], Generator]
GENERATORS: dict[str, MakeGenerator] = {
    "slots": lambda writer, slots, source, draft, states: SlotGenerator(
        writer, slots=slots, source=source, states=states
    ),
}


def make_generator(
    name: str,
    writer: LanguageModel,
    *,
    slots: int,
    source: str = "teacher",
    draft: LanguageModel | None = None,
    states: StateRequest = NO_STATES,
) -> Generator:
    """Return the generator called `name` with `writer`. One that speculates may draft with `draft`.

    Args:
        slots: answers written side by side, unless the generator has settings of its own.
        states: hidden states of the writer to record with its text. The engine's generator records none.

    Raises:
        ConfigError: no generator of this name is registered in this process.
    """
    if name not in GENERATORS:
        raise ConfigError(
            f"data.generator={name} is not available here; use {', '.join(GENERATORS)} (or launcher=local)"
        )
    return GENERATORS[name](writer, slots, source, draft, states)


__all__ = ["GENERATORS", "SlotGenerator", "make_generator"]
