"""The served target in the trainer's process, loaded once for all drafts, and only if one needs it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from distillspec.config import TargetConfig
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, load_target
from distillspec.serving.online.log.records import LogKey
from distillspec.serving.online.state.layout import OnlineSettings


class LoadedTarget:
    """Loads the target when it is first asked for.

    Args:
        served: the target.
        weights_hash: which it must have.
        log: folder of the log that was written by it.
        device: to load it onto.
    """

    def __init__(self, served: TargetConfig, weights_hash: str, log: Path, device: str) -> None:
        self.device = device
        self._served = served
        self._weights_hash = weights_hash
        self._log = log
        self._model: LanguageModel | None = None
        self._embeddings: LanguageModel | None = None  # the target without its layers

    @classmethod
    def of(cls, settings: OnlineSettings, key: LogKey) -> LoadedTarget:
        """Return the target that a log with this key was written by."""
        return cls(settings.target, key.weights_hash, settings.layout.replay, settings.adapt.device)

    @property
    def known(self) -> LanguageModel | None:
        """The part of it that was loaded so far, None for nothing."""
        return self._model or self._embeddings

    def whole(self) -> LanguageModel:
        """Return the target.

        Raises:
            ConfigError: it is not the one that the log was written by.
        """
        self._model = self._model or self._loaded(self.device)
        return self._model

    def embeddings(self) -> LanguageModel:
        """Return the target, or a part of it that has its embeddings.

        Raises:
            ConfigError: it is not the one that the log was written by.
        """
        if self.known is None:
            self._embeddings = self._loaded("cpu")
            del self._embeddings.layers[:]
        return self._model or self._embeddings or self.whole()

    def _loaded(self, device: str) -> LanguageModel:
        model = load_target(replace(self._served, device=device))
        if model.identity.weights_hash != self._weights_hash:
            raise ConfigError(
                f"target.path={self._served.path} is not the target of the log in {self._log}, whose states "
                "or embeddings the draft reads; set target.path to the served model"
            )
        return model
