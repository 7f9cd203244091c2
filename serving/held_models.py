"""Models that an engine holds: prepared for serving, and given back as they were."""

from __future__ import annotations

from dataclasses import dataclass

from distillspec.models import LanguageModel
from distillspec.models.slot_cache import hook, unhook
from distillspec.serving.execution.packed_linear import PackedLinears


@dataclass
class HeldModel:
    """One model in use, and the mode it was in before."""

    model: LanguageModel
    was_training: bool
    packs: PackedLinears | None
    holds: int = 1

    def restore(self) -> None:
        """Undo the preparation."""
        if self.packs is not None:
            self.packs.detach()
        unhook(self.model.model)
        self.model.model.train(self.was_training)


class HeldModels:
    """Models with slot attention, packed weights where they help, and no dropout, until they are released.

    Args:
        pack_weights: False leaves all weights as they are.
    """

    def __init__(self, *, pack_weights: bool) -> None:
        self._pack_weights = pack_weights
        self._held: list[HeldModel] = []

    def __bool__(self) -> bool:
        """True while any model is held."""
        return bool(self._held)

    def hold(self, model: LanguageModel) -> None:
        """Prepare a model for serving. A model held twice must be released twice."""
        if (held := self._find(model)) is not None:
            held.holds += 1
            return
        packs = PackedLinears(model) if self._pack_weights and PackedLinears.helps(model) else None
        self._held.append(HeldModel(model, model.model.training, packs))
        model.model.eval()
        hook(model.model)
        if packs is not None:
            packs.attach()

    def release(self, model: LanguageModel) -> None:
        """Give a held model back in the mode it came in."""
        held = self._find(model)
        assert held is not None, f"{model.name} is not held"
        held.holds -= 1
        if held.holds == 0:
            self._held.remove(held)
            held.restore()

    def release_all(self) -> None:
        """Give all models back. More calls do nothing."""
        while self._held:
            self._held.pop(0).restore()

    def packs_of(self, model: LanguageModel) -> PackedLinears | None:
        """Return the packed weights of a held model, None where packing does not help it."""
        held = self._find(model)
        assert held is not None, f"{model.name} is not held"
        return held.packs

    def _find(self, model: LanguageModel) -> HeldModel | None:
        return next((held for held in self._held if held.model is model), None)
