"""`distill bench`: one Poisson load on an engine under several policies, or on several servers."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.console import Console

from distillspec.commands.run_folder import close_run, open_run
from distillspec.config import BenchCommand
from distillspec.config.engine import EngineConfig
from distillspec.errors import ConfigError, RunError
from distillspec.models import load_target
from distillspec.progress import progress
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.fixed import FixedLength, FixedTree, joined
from distillspec.serving.base.params import SamplingParams
from distillspec.serving.base.wrapped import innermost
from distillspec.serving.baselines.by_name import named_controller
from distillspec.serving.baselines.tree_names import tree_settings
from distillspec.serving.bench.drive import drive
from distillspec.serving.bench.load import Arrival, Question, poisson_load
from distillspec.serving.bench.records import LoadRecord
from distillspec.serving.bench.rounds import Records, Side, as_json, figures, take_turns, times_faster, write_records
from distillspec.serving.bench.table import engine_table, server_table, source_lines
from distillspec.serving.commands.bench_prompts import read_prompts, read_questions
from distillspec.serving.commands.measured_engine import (
    check_grows,
    check_no_store,
    check_speculates,
    find_named,
    fitting,
)
from distillspec.serving.draft_loading import device_of_drafts, evaluated, load_drafts
from distillspec.serving.engine import Engine
from distillspec.serving.proposers.by_name import drafting_alone, free_sources, use_trees
from distillspec.serving.selection.by_name import compared_selection
from distillspec.serving.selection.selecting import SelectingController
from distillspec.types import Prompt

if TYPE_CHECKING:
    from distillspec.serving.bench.servers import Server  # needs httpx, of the extra `serve`


JOINED = "joined"  # in place of a selection: all drafts that `engine.proposer` names draft together


class _Policy(NamedTuple):
    """A side of the engine: what chooses shapes, and settings that say how drafts grow them."""

    controller: LengthController
    trees: EngineConfig


def run(config: BenchCommand, folder: Path) -> None:
    """Write `requests.json` (every request), `load.png` and `summary.json`.

    Raises:
        ConfigError: a setting is impossible, or a server does not answer or match `url`, `model` and `key_env`.
        RunError: a server answered no request. The files are written first.
    """
    torch.manual_seed(config.seed)
    if config.urls:
        _bench_servers(config, folder)
    else:
        _bench_engine(config, folder)


def _bench_engine(config: BenchCommand, folder: Path) -> None:
    check_no_store(config.engine)
    paths = find_named(config.engine, config.drafts)
    target = load_target(config.target)
    device = device_of_drafts(config.draft.device, target)
    draft = load_drafts(paths or config.draft.path, target, device)
    prompts = read_prompts(config.bench.prompts, config.bench.longest_prompt, target, "bench.prompts")
    # Lengths are compared, and not every policy knows sources with likely nodes. `engine.proposer` can name these.
    engine = Engine(target, draft, config.engine if draft is None else drafting_alone(config.engine))
    try:
        policies = _policies(config, engine)
        if any(name != "none" for name in config.bench.policies):
            check_speculates(engine)
        prompts = fitting(prompts, engine, "bench.prompts")
        open_run(folder, config)
        sides = {name: _engine_side(engine, policy) for name, policy in policies.items()}
        records = _measure(config, sides, prompts)
    finally:
        engine.close()
    first = next(iter(policies))
    summaries, ratios = figures(records), times_faster(records, first, config.seed)
    Console().print(engine_table(summaries, ratios, first))
    for line in source_lines(summaries):
        print(line)
    write_records(records, summaries, "policy", folder)
    close_run(folder, "bench", {"policies": as_json(summaries), f"times_faster_than_{first}": ratios})


def _bench_servers(config: BenchCommand, folder: Path) -> None:
    if missing := [name for name in ("httpx",) if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"distill bench url= needs {', '.join(missing)}: pip install 'distillspec[serve]'")
    from distillspec.serving.bench.servers import find_server

    questions = read_questions(config.bench)
    names = config.key_env * len(config.urls) if len(config.key_env) == 1 else config.key_env
    servers = [
        find_server(url, config.model, os.environ.get(name, ""), name)
        for url, name in zip(config.urls, names, strict=True)
    ]
    open_run(folder, config)
    sides = {server.name: _server_side(server, config.bench.timeout_s) for server in servers}
    records = _measure(config, sides, questions)
    first = servers[0].name
    summaries, ratios = figures(records), times_faster(records, first, config.seed)
    Console().print(server_table(summaries, ratios, first))
    write_records(records, summaries, "server", folder)
    models = {server.name: server.model for server in servers}
    close_run(folder, "bench", {"servers": as_json(summaries), "models": models, f"times_faster_than_{first}": ratios})
    _report_errors(records)


def _report_errors(records: Records) -> None:
    """Print the failures of every server. Raise RunError if one answered nothing."""
    silent = []
    for rate, by_side in records.items():
        for name, rounds in by_side.items():
            joined = LoadRecord.joined(rounds)
            if joined.failed:
                reasons = ", ".join(f"{reason}: {count}" for reason, count in joined.errors.items())
                print(f"{rate:g} requests/s, {name}: {joined.failed} failed ({reasons})")
            if not joined.requests:
                silent.append(f"{name} ({', '.join(joined.errors)})")
    if silent:
        raise RunError(f"nothing was answered by {'; '.join(dict.fromkeys(silent))}")


def _policies(config: BenchCommand, engine: Engine) -> dict[str, _Policy]:
    settings, with_model = config.engine, engine.draft is not None
    speculation_length = settings.speculation_length

    def controller(name: str) -> LengthController:
        return named_controller(name, speculation_length, engine.costs, drafts_with_model=with_model, settings=settings)

    policies: dict[str, _Policy] = {}
    for name in config.bench.policies:
        if named := tree_settings(name, settings):
            check_grows(name, named, engine)
        trees = named or settings
        if not config.drafts or name in ("none", "fixed-0"):
            policies[name] = _Policy(controller(name), trees)
            continue
        for chosen in config.bench.selections or [_usual(controller(name), settings)]:
            side = f"{name} {chosen}" if config.bench.selections else name
            policies[side] = _Policy(_of_drafts(name, controller(name), chosen, engine, settings), trees)
    for name, policy in policies.items():
        if policy.controller.speculation_length > speculation_length:
            raise ConfigError(
                f"policy {name} drafts more than engine.speculation_length={speculation_length}; raise that"
            )
        inside = innermost(policy.controller)
        nodes = inside.shape.nodes if isinstance(inside, FixedTree) else 0
        if nodes > policy.trees.nodes:
            raise ConfigError(f"policy {name} has {nodes} tokens, above engine.nodes={policy.trees.nodes}; raise that")
    return policies


def _usual(controller: LengthController, settings: EngineConfig) -> str:
    """Return what happens to several drafts under a policy where no selections are compared."""
    joins = settings.named_drafts and isinstance(controller, FixedLength | FixedTree)
    return JOINED if joins else settings.selection


def _of_drafts(
    policy: str, inside: LengthController, chosen: str, engine: Engine, settings: EngineConfig
) -> LengthController:
    """Return the controller of a policy for several drafts: one for each request, or all in one tree."""
    if chosen != JOINED:
        return _selecting(inside, chosen, engine, settings)
    if not settings.named_drafts:
        raise ConfigError(f"bench.selections=[{JOINED}] joins the drafts of engine.proposer=[A,B]; name them there")
    try:
        return joined(inside, len(settings.proposers))
    except ConfigError as error:
        raise ConfigError(f"policy {policy}: {error}") from error


def _selecting(inside: LengthController, chosen: str, engine: Engine, settings: EngineConfig) -> SelectingController:
    options = settings.selection_options if chosen == settings.selection else {}
    return compared_selection(
        inside,
        chosen,
        list(engine.drafts),
        options,
        seed=settings.seed,
        expected=evaluated(engine.drafts),
        free=free_sources(settings),
        costs=engine.costs,
    )


def _measure(config: BenchCommand, sides: dict[str, Side[Any]], prompts: Sequence[Any]) -> Records:
    bench, policy = config.bench, config.sampling.policy
    params = SamplingParams(
        temperature=policy.temperature,
        top_k=policy.top_k,
        top_p=policy.top_p,
        min_p=policy.min_p,
        max_tokens=bench.max_tokens,
        ignore_eos=bench.ignore_eos,
    )

    def load(rate: float, round_: int) -> list[Arrival[Any]]:
        return poisson_load(prompts, params, rate, bench.seconds, config.seed + round_)

    return take_turns(sides, bench.rates, bench.rounds, load)


def _engine_side(engine: Engine, policy: _Policy) -> Side[Prompt]:
    def run_load(load: Sequence[Arrival[Prompt]], title: str) -> LoadRecord:
        engine.use_controller(policy.controller)
        use_trees(engine.proposer, policy.trees)
        engine.forget_tenant("default")  # prompts and answers that the side before has cached
        with progress(title) as line:
            return drive(engine, load, on_progress=lambda done: line.update(done / len(load), _done(done, load)))

    return run_load


def _server_side(server: Server, timeout_s: float) -> Side[Question]:
    from distillspec.serving.bench.drive_server import drive_server

    def run_load(load: Sequence[Arrival[Question]], title: str) -> LoadRecord:
        with progress(title) as line:
            return drive_server(
                server, load, timeout_s, on_progress=lambda done: line.update(done / len(load), _done(done, load))
            )

    return run_load


def _done(done: int, load: Sequence[Any]) -> str:
    return f"{done} of {len(load)} requests answered"
