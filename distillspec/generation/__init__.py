"""Writing text with models: the Hugging Face implementation of `distillspec.types.Generator`."""

from distillspec.generation.slots import SlotGenerator

__all__ = ["SlotGenerator"]
