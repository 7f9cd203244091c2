"""`profile.json`: what passes of one target and draft cost on one machine, measured by `distill profile`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from scipy.optimize import nnls

from distillspec.config.engine import EngineConfig
from distillspec.errors import ConfigError
from distillspec.files import write_json
from distillspec.models import LanguageModel
from distillspec.provenance import hardware
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable

VERSION = 4
FILE = "profile.json"
APART = 1.15  # least ratio of two knots of a fitted table
ROWS_MATTER = 0.8  # of the error without a cost of rows: a fit with one is taken where it is below


@dataclass(frozen=True)
class Timed:
    """Work that was timed: `passes` forward passes over `tokens` tokens of `rows` rows with `context` tokens cached.

    All are sums over the passes.
    """

    context: float
    tokens: float
    passes: float
    seconds: float  # median over rounds
    rows: float = 0
    held_out: bool = False  # not seen by the fit
    # Of a verification: seconds over those of the plain pass beside it, with its 95 % interval.
    over_plain: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class Fitted:
    """A model's cost table, and how far it is off where it was not fitted."""

    cost: CostTable
    held_out_error: float  # median of |predicted / measured − 1| on the held-out points
    points: tuple[Timed, ...]

    def predicted(self, point: Timed) -> float:
        """Seconds that the table gives for a point's work."""
        every = (point.context, point.tokens, point.rows)
        return self.cost.first + point.passes * self.cost.seconds(*[one / point.passes for one in every])


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
class Profile:
    """Measured costs of passes. `draft` and `draft_cost` are None without a draft."""

    machine: Mapping[str, Any]
    passes: PassKey
    target: ModelKey
    target_cost: Fitted  # newest and drafted tokens with verdicts, and prompts
    draft: ModelKey | None = None
    draft_cost: Fitted | None = None
    draft_at_once: bool = False  # the draft drafts blocks
    host: HostCost = NO_HOST

    @property
    def latency(self) -> LatencyModel:
        draft = None if self.draft_cost is None else self.draft_cost.cost
        return LatencyModel(self.target_cost.cost, draft, at_once=self.draft_at_once)

    def save(self, path: Path) -> None:
        write_json(path, {"version": VERSION, **asdict(self)})

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
                    _fitted(stored["target_cost"]),
                    None if stored["draft"] is None else ModelKey(**stored["draft"]),
                    None if stored["draft_cost"] is None else _fitted(stored["draft_cost"]),
                    bool(stored.get("draft_at_once", False)),
                    HostCost(*stored.get("host", ())),
                )
        except (ValueError, TypeError, KeyError, AttributeError, ConfigError) as error:
            raise ConfigError(f"profile={path} cannot be read ({error}); measure again with distill profile") from error
        raise ConfigError(f"profile={path} has version {version}, not {VERSION}; measure again with distill profile")

    @classmethod
    def load(
        cls, path: Path, target: LanguageModel, draft: LanguageModel | None = None, settings: EngineConfig | None = None
    ) -> Profile:
        """Read a file made with these models on this machine. Without a draft, costs of drafting are left out.

        Raises:
            ConfigError: as `read`, or it is of another model, number format or machine, or of passes that run in
                another way than under `settings`; the line says which.
        """
        profile = cls.read(path)
        problem = profile.target.differs_from(target) or _other_machine(profile.machine, machine(target.device))
        if problem is None and settings is not None:
            problem = profile.passes.differs_from(settings)
        if problem is None and draft is not None:
            none = "it measured no draft" if profile.draft is None else None
            problem = none or (profile.draft.differs_from(draft) if profile.draft is not None else None)
        if problem is not None:
            raise ConfigError(f"profile={path} does not fit: {problem}; measure again with distill profile")
        return profile


def machine(device: torch.device) -> dict[str, Any]:
    """Return the properties that decide the speed of passes on `device`, without the machine's name."""
    if device.type == "cuda":
        return {"device": "cuda", "gpu": torch.cuda.get_device_name(device)}
    found = hardware()
    return {"device": device.type, "cpu": found["cpu"], "cores": found["cores"], "threads": found["torch_threads"]}


def fit(points: Sequence[Timed]) -> Fitted:
    """Fit a table of least squared relative error to the points that are not held out, with no cost below 0.

    Knots are numbers of tokens that were timed. A cost of rows is fitted where it clearly lowers the error. Raises
    ValueError where there are less than two numbers of tokens, or a time is not above 0.
    """
    seen = [point for point in points if not point.held_out]
    if not seen or min(point.seconds for point in points) <= 0:
        raise ValueError("nothing to fit: no points, or times that are not above 0")
    cost = _fitted_table(seen, by_row=False)
    if len({point.rows / point.passes for point in seen}) > 1:  # else they cannot be told from the fixed part
        with_rows = _fitted_table(seen, by_row=True)
        if _error(with_rows, seen) < ROWS_MATTER * _error(cost, seen):
            cost = with_rows
    return Fitted(cost, _error(cost, [point for point in points if point.held_out] or seen), tuple(points))


def _fitted_table(points: Sequence[Timed], by_row: bool) -> CostTable:
    """Fit the seconds of the first knot and the rise to each further one, each ≥ 0."""
    knots = _knots([point.tokens / point.passes for point in points])
    eye = [CostTable(tuple((at, float(at >= knot)) for at in knots)) for knot in knots]
    by_loop = len({point.passes for point in points}) > 1  # else a first pass cannot be told from the others
    work = [
        [p.context, p.rows * by_row, by_loop, *(p.passes * rise.seconds(0, p.tokens / p.passes) for rise in eye)]
        for p in points
    ]
    relative = numpy.array(work) / numpy.array([[point.seconds] for point in points])
    scale = numpy.maximum(relative.max(0), 1e-12)
    per_context, per_row, first, *rises = (nnls(relative / scale, numpy.ones(len(points)))[0] / scale).tolist()
    return CostTable.rising(zip(knots, numpy.cumsum(rises).tolist(), strict=True), per_context, per_row, first)


def _knots(tokens: Sequence[float]) -> list[float]:
    """Return numbers of tokens that lie apart, the least and the largest among them."""
    known = sorted(set(tokens))
    if len(known) < 2:
        raise ValueError(f"nothing to fit: {known} is one number of tokens, which shows no slope")
    found = [known[0]]
    for one in known[1:-1]:
        if one >= APART * found[-1] and APART * one <= known[-1]:
            found.append(one)
    return [*found, known[-1]]


def _error(cost: CostTable, points: Sequence[Timed]) -> float:
    """Median of |predicted / measured − 1|."""
    fitted = Fitted(cost, 0.0, ())
    return float(numpy.median([abs(fitted.predicted(point) / point.seconds - 1) for point in points]))


def _fitted(stored: Mapping[str, Any]) -> Fitted:
    points = tuple(Timed(**{**point, "over_plain": _interval(point["over_plain"])}) for point in stored["points"])
    return Fitted(CostTable.from_json(stored["cost"]), float(stored["held_out_error"]), points)


def _interval(stored: Any) -> tuple[float, float, float] | None:
    """Read an interval, a list in JSON."""
    if stored is None:
        return None
    median, low, high = stored
    return float(median), float(low), float(high)


def _other_machine(measured: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    for name in here:
        if measured.get(name) != here[name]:
            return f"it was measured with {name}={measured.get(name)}, and here {name} is {here[name]}"
    return None
