"""`profile.json`: what passes of a target and its drafts cost on one machine, measured by `distill profile`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from distillspec.config.engine import EngineConfig
from distillspec.errors import ConfigError
from distillspec.files import write_json
from distillspec.models import LanguageModel
from distillspec.provenance import hardware
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.costs.fitted import Fitted
from distillspec.serving.costs.latency import LatencyModel

VERSION = 6
FILE = "profile.json"


@dataclass(frozen=True)
class ModelKey:
    """The measured model and its dtype."""

    name: str
    weights_hash: str
    dtype: str

    @classmethod
    def of(cls, model: LanguageModel) -> ModelKey:
        return cls(model.name, model.identity.weights_hash, str(model.dtype).removeprefix("torch."))

    def differs_from(self, model: LanguageModel) -> str | None:
        """Return the difference from `model` in words, None if it is the same."""
        other = ModelKey.of(model)
        if self.weights_hash != other.weights_hash:
            return f"it measured {self.name}, whose weights differ from {other.name}'s"
        return None if self.dtype == other.dtype else f"it measured {self.name} in {self.dtype}, not in {other.dtype}"


@dataclass(frozen=True)
class PassKey:
    """Settings of the engine that change the costs of passes."""

    pack_weights: bool = True
    compile: bool | str = False

    @classmethod
    def of(cls, settings: EngineConfig) -> PassKey:
        return cls(settings.pack_weights, settings.compile)

    def differs_from(self, settings: EngineConfig) -> str | None:
        """Return the difference from an engine's passes in words, None if they are the same."""
        for name, here in vars(PassKey.of(settings)).items():
            measured = getattr(self, name)
            if measured != here and "auto" not in (measured, here):
                return f"it was measured with {name}={str(measured).lower()}, and here it is {str(here).lower()}"
        return None


class HostCost(NamedTuple):
    """Seconds of a step outside its passes: planning, verdicts' results, text."""

    step_s: float = 0.0
    row_s: float = 0.0  # of each row

    def seconds(self, rows: int) -> float:
        return self.step_s + self.row_s * rows

    @classmethod
    def through(cls, points: Mapping[int, float]) -> HostCost:
        """Return the line through the seconds of the fewest and of the most rows, with no cost below 0."""
        few, many = min(points), max(points)
        row_s = max(0.0, (points[many] - points[few]) / max(1, many - few))
        return cls(max(0.0, points[few] - few * row_s), row_s)


NO_HOST = HostCost()


@dataclass(frozen=True)
class ProfiledDraft:
    """A measured draft.

    size: number of its weights, and their dtype. Versions of a draft cost the same while they are of one size.
    drafts_block: one pass gives all its tokens. Files call it `at_once`.
    """

    name: str
    size: str
    cost: Fitted
    drafts_block: bool = False


@dataclass(frozen=True)
class Profile:
    """Measured costs of passes. `drafts` are by source: `DRAFT` an only one, by name those of a pool."""

    machine: Mapping[str, Any]
    passes: PassKey
    target: ModelKey
    target_cost: Fitted  # newest and drafted tokens with verdicts, and prompts
    drafts: Mapping[str, ProfiledDraft] = field(default_factory=dict)
    host: HostCost = NO_HOST

    @property
    def latency(self) -> LatencyModel:
        first = next(iter(self.drafts.values()), None)
        if first is None:
            return LatencyModel(self.target_cost.cost)
        members = {} if DRAFT in self.drafts else {source: draft.cost.cost for source, draft in self.drafts.items()}
        return LatencyModel(self.target_cost.cost, first.cost.cost, drafts_block=first.drafts_block, members=members)

    @property
    def title(self) -> str:
        """The machine and the models, in words."""
        models = ", ".join([self.target.name, *(draft.name for draft in self.drafts.values())])
        return f"{self.machine.get('gpu', self.machine.get('cpu', 'a machine'))}, {models}"

    def save(self, path: Path) -> None:
        stored = asdict(self)
        for draft in stored["drafts"].values():
            draft["at_once"] = draft.pop("drafts_block")
        write_json(path, {"version": VERSION, **stored})

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Read a file, whatever models and machine it is of.

        Raises:
            ConfigError: there is none, it is of another version, or it is damaged.
        """
        file = path / FILE if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(f"profile={path} does not exist; make it with distill profile")
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
            version = stored.pop("version")
            if version == VERSION:
                return cls(
                    stored["machine"],
                    PassKey(**stored["passes"]),
                    ModelKey(**stored["target"]),
                    Fitted.from_json(stored["target_cost"]),
                    {source: _draft(draft) for source, draft in stored["drafts"].items()},
                    HostCost(*stored["host"]),
                )
        except (ValueError, TypeError, KeyError, AttributeError, ConfigError) as error:
            raise ConfigError(f"profile={path} cannot be read ({error}); measure again with distill profile") from error
        raise ConfigError(f"profile={path} has version {version}, not {VERSION}; measure again with distill profile")

    @classmethod
    def load(
        cls, path: Path, target: LanguageModel, drafts: Mapping[str, LanguageModel], settings: EngineConfig
    ) -> Profile:
        """Read a file made with these models on this machine.

        Args:
            drafts: by source. Each gets the costs of the measured draft of its size, of its source where several are.
                Without any the measured ones are kept: a draft may be loaded later.
            settings: of the engine whose passes it shall price.

        Raises:
            ConfigError: as `read`, or it is of another target, number format or machine, of passes that run in another
                way, or of drafts of other sizes. The line says which.
        """
        profile = cls.read(path)
        problem = profile.target.differs_from(target) or _other_machine(profile.machine, machine(target.device))
        problem = problem or profile.passes.differs_from(settings)
        alike = {source: profile._alike(source, draft) for source, draft in drafts.items()}
        for source, draft in drafts.items():
            if alike[source] is None and problem is None:
                problem = f"it measured {profile._measured}, not {draft.name} ({size_of(draft)})"
        if problem is not None:
            raise ConfigError(f"profile={path} does not fit: {problem}; measure again with distill profile")
        measured = {source: draft for source, draft in alike.items() if draft is not None}
        return replace(profile, drafts=measured) if drafts else profile

    def _alike(self, source: str, draft: LanguageModel) -> ProfiledDraft | None:
        """Return the measured draft of a draft's size."""
        alike = {name: measured for name, measured in self.drafts.items() if measured.size == size_of(draft)}
        return alike.get(source) or next(iter(alike.values()), None)

    @property
    def _measured(self) -> str:
        return ", ".join(f"{draft.name} ({draft.size})" for draft in self.drafts.values()) or "no draft"


def size_of(model: LanguageModel) -> str:
    """Return the number of a model's weights, and their dtype."""
    return f"{count_weights(model)} weights in {model.dtype}".replace("torch.", "")


def count_weights(model: LanguageModel) -> int:
    """Return the number of a model's weights."""
    return sum(weights.numel() for weights in model.model.parameters())


def machine(device: torch.device) -> dict[str, Any]:
    """Return the properties that decide the speed of passes on `device`, without the machine's name."""
    if device.type == "cuda":
        return {"device": "cuda", "gpu": torch.cuda.get_device_name(device)}
    found = hardware()
    return {"device": device.type, "cpu": found["cpu"], "cores": found["cores"], "threads": found["torch_threads"]}


def _draft(stored: Mapping[str, Any]) -> ProfiledDraft:
    fields = {"drafts_block" if name == "at_once" else name: value for name, value in stored.items()}
    return ProfiledDraft(**{**fields, "cost": Fitted.from_json(stored["cost"])})


def _other_machine(measured: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    for name in here:
        if measured.get(name) != here[name]:
            return f"it was measured with {name}={measured.get(name)}, and here {name} is {here[name]}"
    return None
