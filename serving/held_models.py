"""Models that an engine holds: prepared for serving, and given back as they were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from distillspec.models import LanguageModel
from distillspec.serving.execution.prepared import PreparedModel


@dataclass
class HeldModel:
    """One model in use, and by how many users."""

    prepared: PreparedModel
    holds: int = 1


class HeldModels:
    """Models that are prepared until they are released. The arguments are those of `PreparedModel`."""

    def __init__(self, *, pack_weights: bool, compile: bool | str) -> None:
        self._pack_weights, self._compile = pack_weights, compile
        self._held: list[HeldModel] = []

    def __bool__(self) -> bool:
        """True while any model is held."""
        return bool(self._held)

    def hold(self, model: LanguageModel, feature_ids: Sequence[int] = (), *, exact: bool = True) -> None:
        """Prepare a model for serving. A model held twice must be released twice.

        Args:
            feature_ids: states that its passes hand out.
            exact: False for a draft, whose weights may be rounded. A model that is held already stays as it is.
        """
        if (held := self._find(model)) is not None:
            held.holds += 1
            return
        prepared = PreparedModel(
            model, pack_weights=self._pack_weights, compile=self._compile, feature_ids=feature_ids, exact=exact
        )
        self._held.append(HeldModel(prepared))

    def release(self, model: LanguageModel) -> None:
        """Give a held model back in the mode it came in."""
        held = self._find(model)
        assert held is not None, f"{model.name} is not held"
        held.holds -= 1
        if held.holds == 0:
            self._held.remove(held)
            held.prepared.restore()

    @contextmanager
    def released_on_failure(self) -> Iterator[None]:
        """Release all models if the block raises."""
        try:
            yield
        except BaseException:
            self.release_all()
            raise

    def release_all(self) -> None:
        """Give all models back. More calls do nothing."""
        while self._held:
            self._held.pop(0).prepared.restore()

    def prepared(self, model: LanguageModel) -> PreparedModel:
        """Return a held model as it was prepared."""
        held = self._find(model)
        assert held is not None, f"{model.name} is not held"
        return held.prepared

    def _find(self, model: LanguageModel) -> HeldModel | None:
        return next((held for held in self._held if held.prepared.model is model), None)
