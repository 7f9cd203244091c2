"""`profile.json`: what passes of one target and draft cost on one machine, measured by `distill profile`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from scipy.optimize import nnls

from distillspec.config.engine import EngineConfig
from distillspec.errors import ConfigError
from distillspec.files import write_json
from distillspec.models import LanguageModel
from distillspec.provenance import hardware
from distillspec.serving.control.latency import ForwardCost, LatencyModel

VERSION = 3
SMOOTH = 0.03  # median error of a line on the points it was fitted to, up to which it is taken as it is
FILE = "profile.json"


@dataclass(frozen=True)
class Timed:
    """Work that was timed: `passes` forward passes over `tokens` tokens with `context` tokens cached, all summed."""

    context: float
    tokens: float
    passes: float
    seconds: float  # median over rounds
    held_out: bool = False  # not seen by the fit
    # Of a verification: seconds over those of the plain pass beside it, with its 95 % interval.
    over_plain: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class Fitted:
    """Coefficients, and how far they are off where they were not fitted."""

    cost: ForwardCost
    held_out_error: float  # median of |predicted / measured − 1| on the held-out points
    points: tuple[Timed, ...]

    def predicted(self, point: Timed) -> float:
        """Seconds that the coefficients give for a point's work."""
        even = float(_work([point], self.cost.experts, self.cost.active)[0] @ _coefficients(self.cost))
        return even + point.passes * self.cost.bump_s(point.tokens / point.passes)


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


@dataclass(frozen=True)
class Profile:
    """Measured costs. `drafting` is None without a draft."""

    machine: Mapping[str, Any]
    passes: PassKey
    target: ModelKey
    verification: Fitted  # the target's pass over newest and drafted tokens, verdicts included
    prefill: Fitted  # its pass over prompts
    draft: ModelKey | None = None
    drafting: Fitted | None = None

    @property
    def latency(self) -> LatencyModel:
        draft = None if self.drafting is None else self.drafting.cost
        return LatencyModel(self.verification.cost, draft, prefill=self.prefill.cost)

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
                    _fitted(stored["verification"]),
                    _fitted(stored["prefill"]),
                    None if stored["draft"] is None else ModelKey(**stored["draft"]),
                    None if stored["drafting"] is None else _fitted(stored["drafting"]),
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


def experts_of(model: LanguageModel) -> tuple[int, int]:
    """Return experts a layer and experts that a token uses, (0, 0) for dense models."""
    config = model.model.config.get_text_config()
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((int(getattr(config, name)) for name in names if getattr(config, name, None)), 0)
    active = int(getattr(config, "num_experts_per_tok", None) or 0)
    return (experts, min(active, experts)) if experts and active else (0, 0)


def fit(points: Sequence[Timed], experts: int = 0, active: int = 0, *, may_bump: bool = False) -> Fitted:
    """Non-negative coefficients of least squared relative error on the points that are not held out (SmartSpec, Eq. 7).

    `may_bump`: where that line is off by more than noise, what it is off by is told by the number of tokens.
    Raises ValueError where there is no point to fit, or a time is not above 0.
    """
    seen = [point for point in points if not point.held_out]
    if not seen or min(point.seconds for point in points) <= 0:
        raise ValueError("nothing to fit: no points, or times that are not above 0")
    work = _work(seen, experts, active) / numpy.array([point.seconds for point in seen])[:, None]
    scale = numpy.maximum(work.max(0), 1e-12)
    found, _ = nnls(work / scale, numpy.ones(len(seen)))
    context, token, fixed, *expert = (found / scale).tolist()
    cost = ForwardCost(context, token, fixed, expert[0] if expert else 0.0, experts, active)
    if may_bump and _error(cost, seen) > SMOOTH:
        cost = _with_bumps(cost, seen)
    return Fitted(cost, _error(cost, [point for point in points if point.held_out] or seen), tuple(points))


def _error(cost: ForwardCost, points: Sequence[Timed]) -> float:
    """Median of |predicted / measured − 1|."""
    fitted = Fitted(cost, 0.0, ())
    return float(numpy.median([abs(fitted.predicted(point) / point.seconds - 1) for point in points]))


def _with_bumps(line: ForwardCost, points: Sequence[Timed]) -> ForwardCost:
    """Fit seconds at each number of tokens in place of a line. Differences from the line are the bumps.

    Fits the increases between neighbouring sizes, each ≥ 0.
    """
    knots = sorted({point.tokens / point.passes for point in points})
    if len(knots) < 2:
        return line
    hats = numpy.array(
        [numpy.interp([p.tokens / p.passes for p in points], knots, hat) for hat in numpy.eye(len(knots))]
    )
    steps = hats[::-1].cumsum(0)[::-1]  # what one second more from a knot on adds
    passes, context = (numpy.array([getattr(point, name) for point in points]) for name in ("passes", "context"))
    work = numpy.stack([context, *(passes * steps)], 1) / numpy.array([point.seconds for point in points])[:, None]
    scale = numpy.maximum(work.max(0), 1e-12)
    per_context, *rises = (nnls(work / scale, numpy.ones(len(points)))[0] / scale).tolist()
    seconds = numpy.cumsum(rises).tolist()
    bent = replace(line, per_context=per_context)
    bumps = tuple((tokens, s - bent.seconds(0, tokens)) for tokens, s in zip(knots, seconds, strict=True))
    return replace(bent, bumps=bumps)


def _work(points: Sequence[Timed], experts: int, active: int) -> numpy.ndarray[Any, numpy.dtype[numpy.float64]]:
    """`[n, 3]`, with experts `[n, 4]`: what each coefficient is multiplied by."""
    rows = [[point.context, point.tokens, point.passes] for point in points]
    if experts:
        shape = ForwardCost(0, 0, 0, 0, experts, active)
        for row, point in zip(rows, points, strict=True):
            row.append(point.passes * shape.loaded_experts(point.tokens / point.passes))
    return numpy.array(rows, dtype=numpy.float64)


def _coefficients(cost: ForwardCost) -> numpy.ndarray[Any, numpy.dtype[numpy.float64]]:
    dense = [cost.per_context, cost.per_token, cost.fixed]
    return numpy.array([*dense, cost.per_expert] if cost.experts else dense)


def _interval(stored: Any) -> tuple[float, float, float] | None:
    """Read an interval, a list in JSON. None in old profiles."""
    if stored is None:
        return None
    median, low, high = stored
    return float(median), float(low), float(high)


def _fitted(stored: Mapping[str, Any]) -> Fitted:
    points = tuple(Timed(**{**point, "over_plain": _interval(point.get("over_plain"))}) for point in stored["points"])
    bumps = tuple((float(tokens), float(seconds)) for tokens, seconds in stored["cost"]["bumps"])
    cost = ForwardCost(**{**stored["cost"], "bumps": bumps}).rising()  # earlier versions did not see to it
    return Fitted(cost, float(stored["held_out_error"]), points)


def _other_machine(measured: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    for name in here:
        if measured.get(name) != here[name]:
            return f"it was measured with {name}={measured.get(name)}, and here {name} is {here[name]}"
    return None
