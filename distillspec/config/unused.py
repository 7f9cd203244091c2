"""Settings without effect beside the others. Typing one is refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distillspec.config.bench import BenchCommand
from distillspec.config.commands import EvalCommand, GenerateCommand, InitDraftCommand, SimulateCommand, TrainCommand
from distillspec.config.models import DraftConfig
from distillspec.config.online_commands import AdaptCommand, ReplayCommand, VersionsCommand
from distillspec.config.registry import CONTROLLERS, DRAFT_KINDS, LOSSES, PROPOSERS, Choice, choices_that
from distillspec.config.serve import ServeCommand
from distillspec.errors import ConfigError

OF_THE_FILE = ("data.split", "data.prompt_field", "data.domain_field")
OF_THE_PROMPTS = ("data.prompts", *OF_THE_FILE, "data.response_field", "data.num_prompts", "data.max_prompt_tokens")
OF_THE_SAMPLES = (
    "data.num_prompts",
    "data.max_minutes",
    "data.temperature",
    "data.top_p",
    "data.signal",
    "data.signal_entries",
    "data.tail_draws",
    "data.refresh_prompts",
    "data.shard_sequences",
)
LEARNING = "online=on or online=decoupled"
OF_LEARNING = (
    *("loss", "loss.*", "tracker.*", "replay.*", "adapt.*", "gate.*"),
    *("online.folder", "online.metrics_s", "online.keep_versions"),
)
OF_THE_TRAINER = (  # of the online trainer, whatever process it runs in
    *("loss", "loss.*", "tracker", "tracker.*", "gate.evidence", "gate.speculation_length"),
    *("adapt.mode", "adapt.positions", "adapt.accepted_weight", "adapt.replay_share", "adapt.offline"),
    *("adapt.offline_share", "adapt.tenant_share", "adapt.vocabulary", "adapt.epochs"),
    *("adapt.max_steps", "adapt.learning_rate", "adapt.batch_tokens", "adapt.row_tokens", "adapt.clip_norm"),
    *("adapt.max_bad_steps", "adapt.max_bad_updates", "adapt.threads", "adapt.device"),
    "adapt.gpu_memory_share",
)
OF_THE_SUPERVISOR = ("adapt.niceness", "adapt.busy_share")  # of a trainer that the server starts itself
READING = "a draft that reads the target's states, such as draft=eagle"
OF_THE_TRACE = (
    "workload.rates",
    "workload.prompt_tokens",
    "workload.prompt_spread",
    "workload.output_tokens",
    "workload.output_spread",
)


@dataclass(frozen=True)
class Rule:
    """Settings `keys`, with an effect only where `holds(config)`. `needs` is that condition in settings.

    Typing the word `unless` as well shows that the user knows: then nothing is refused.
    """

    keys: tuple[str, ...]  # GROUP.* is every setting below
    holds: Callable[[Any], bool]
    needs: str
    unless: str = ""

    def names(self, key: str) -> bool:
        """Return True if the rule is about the setting `key`."""
        return key in self.keys or any(
            name.endswith(".*") and key.startswith(name.removesuffix("*")) for name in self.keys
        )


def _simulates_trees(config: Any, named: tuple[str, ...]) -> bool:
    """Return True if a simulated policy plans trees, or its name begins with one of `named`."""
    planning = {*CONTROLLERS} - {"fixed", "smartspec"}
    return not isinstance(config, SimulateCommand) or any(
        policy in planning or policy.startswith(("confidence", *named)) for policy in config.policies
    )


def _samples(config: Any) -> bool:
    """Return True if any text is sampled. A file's responses with a stored signal choose the vocabulary themselves."""
    return config.data.source != "fixed" or config.data.signal == "none" or isinstance(config, InitDraftCommand)


def _stores_samples(config: Any) -> bool:
    """Return True if the run fills a data folder of its own with samples."""
    return config.data.cache is None and (not config.data.on_policy or isinstance(config, GenerateCommand))


def _writes(config: Any) -> bool:
    """Return True if text may be sampled in spite of a cache: to choose a vocabulary by, where the cache has none."""
    from_file = config.data.source == "fixed" or isinstance(config, InitDraftCommand)
    return config.data.cache is None or config.data.on_policy or from_file


def _may_read_states(config: Any) -> bool:
    """Return True if the draft reads the target's states. One at draft.path may, whatever the settings are."""
    return config.draft.reads_states or config.draft.kind == "pretrained"


def _learns_online(config: Any) -> bool:
    return not isinstance(config, ServeCommand) or config.online.mode != "off"


def _of_choices(
    table: Mapping[str, Choice], group: str, shown: str, chosen: Callable[[Any], Sequence[str]]
) -> Iterator[Rule]:
    """Yield a rule for each setting that some choices of a table read and others ignore.

    Args:
        shown: how the choice is written on the command line, `loss` or `engine.proposer`.
        chosen: names of the choices of a config that may read the setting.
    """
    for key in dict.fromkeys(key for choice in table.values() for key in choice.reads):
        readers = choices_that(table, read=key)

        def holds(config: Any, readers: list[str] = readers) -> bool:
            return any(name in readers for name in chosen(config))

        yield Rule((f"{group}.{key}",), holds, " or ".join(f"{shown}={name}" for name in readers))


def _draft_kinds(config: Any) -> Sequence[str]:
    """Return the kind, or every one where the command takes a finished draft."""
    return [config.draft.kind] if isinstance(config.draft, DraftConfig) else list(DRAFT_KINDS)


def _proposers(config: Any) -> Sequence[str]:
    """Return the proposers. If none is set, a draft may be loaded later: return those that stand beside it."""
    return config.engine.proposer_kinds


RULES = (
    *_of_choices(DRAFT_KINDS, "draft", "draft", _draft_kinds),
    Rule(("loss.name", "loss"), lambda c: c.loss.mix is None, "loss.mix=null: a mix names its losses"),
    Rule(
        ("loss.beta", "loss.kl", "loss.eta", "loss.params.*"),
        lambda c: c.loss.mix is None,
        "loss.mix=null: a mix has its own",
    ),
    *_of_choices(LOSSES, "loss", "loss", lambda c: [c.loss.name]),
    Rule(("loss.reference",), lambda c: c.loss.select_fraction is not None, "loss.select_fraction"),
    Rule(("data.mixed_lambda", "data.mixed_by", "data.mixed_with"), lambda c: c.data.source == "mixed", "data=mixed"),
    Rule(("data.mixed_with",), lambda c: c.data.mixed_by == "sequence", "data.mixed_by=sequence"),
    Rule(("data.refresh_steps", "data.refresh_keep"), lambda c: c.data.on_policy, "data=draft or data=mixed"),
    Rule(("data.refresh_steps", "data.refresh_keep"), lambda c: hasattr(c, "train"), "distill train"),
    Rule(
        ("data.refresh_prompts",),
        lambda c: c.data.on_policy or c.data.source == "fixed" or isinstance(c, InitDraftCommand),
        "data=draft, data=mixed or data=fixed",
    ),
    Rule(OF_THE_SAMPLES, lambda c: not isinstance(c, EvalCommand), "distill train or distill generate"),
    Rule(("data.temperature", "data.top_p"), _samples, "data=teacher, data=draft or data=mixed"),
    Rule(
        ("data.signal_entries",),
        lambda c: c.data.signal in ("topk", "sampled"),
        "data.signal=topk or data.signal=sampled",
    ),
    Rule(("data.tail_draws",), lambda c: c.data.signal == "topk", "data.signal=topk"),
    Rule(
        ("data.max_minutes", "data.shard_sequences"),
        _stores_samples,
        "samples written before training: data.cache=null, and data=teacher or data=fixed",
    ),
    Rule(
        ("data.state_ids",),
        lambda c: c.data.source == "teacher" and c.data.generator == "slots" and c.data.cache is None,
        "text that the target writes: data=teacher data.generator=slots data.cache=null",
    ),
    Rule(
        ("data.state_precision",),
        lambda c: c.data.state_ids is not None or (isinstance(c, TrainCommand) and c.draft.records_states),
        "data.state_ids=[…], or a draft that reads states of a target that stays",
    ),
    Rule(("data.batch_slots",), lambda c: c.data.generator == "slots", "data.generator=slots; use engine.max_slots"),
    Rule(OF_THE_PROMPTS, lambda c: c.data.cache is None, "data.cache=null: a cache brings its own prompts"),
    Rule(OF_THE_FILE, lambda c: c.data.prompts != "selfprompt", "data.prompts=FILE: the target writes its own"),
    Rule(
        ("data.response_field",),
        lambda c: c.data.uses_fixed_responses,
        "data=fixed, or data=mixed data.mixed_with=fixed",
    ),
    Rule(
        ("data.signal_entries", "data.tail_draws"),
        lambda c: c.data.cache is None or c.data.on_policy,
        "data.cache=null, or data=draft or data=mixed: a cache has its own signal",
    ),
    Rule(
        ("data.temperature", "data.top_p"),
        _writes,
        "data.cache=null, or data=draft or data=mixed: a cache has its own text",
    ),
    Rule(
        ("train.unroll", "train.unroll_from"),
        lambda c: _may_read_states(c) and "positions" not in DRAFT_KINDS[c.draft.kind].reads,
        "a draft that reads states and drafts token by token: draft=eagle or draft.features=true",
    ),
    Rule(("train.unroll_decay", "train.unroll_weights"), _may_read_states, READING),
    Rule(
        ("train.feature_gib",),
        lambda c: _may_read_states(c) or c.data.state_ids is not None,
        f"{READING}, or data.state_ids=[…]",
    ),
    Rule(("draft.train_target",), lambda c: isinstance(c, TrainCommand), "distill train"),
    Rule(("train.feature_gib",), lambda c: not c.draft.train_target, "draft.train_target=false: the states change"),
    Rule(
        ("train.target_rate", "train.target_warmup", "train.target_weight"),
        lambda c: c.draft.train_target,
        "draft.train_target=true",
    ),
    Rule(("train.decay_fraction",), lambda c: c.train.schedule == "wsd", "train.schedule=wsd"),
    Rule(
        ("train.eval_share",),
        lambda c: c.train.max_minutes is not None and c.train.eval_every is None,
        "train.max_minutes, and train.eval_every=null",
    ),
    Rule(("evaluation.cost_batches",), lambda c: c.evaluation.measure_cost, "evaluation.measure_cost=true"),
    Rule(
        ("evaluation.speedup_batches", "evaluation.speedup_prompts", "evaluation.speedup_tokens"),
        lambda c: c.evaluation.measure_speedup,
        "evaluation.measure_speedup=true",
    ),
    Rule(
        ("tracker.project", "tracker.name", "tracker.tags"),
        lambda c: c.tracker.kind != "none",
        "tracker=wandb or tracker=tensorboard",
    ),
    Rule(
        OF_LEARNING,
        _learns_online,
        LEARNING,
        unless="online=off",  # service files switch learning off and on with this one word
    ),
    Rule(
        OF_THE_TRAINER,
        lambda c: not isinstance(c, ServeCommand) or c.online.mode != "decoupled",
        "online=on; with online=decoupled give it to distill adapt",
    ),
    Rule(
        OF_THE_SUPERVISOR,
        lambda c: not isinstance(c, AdaptCommand) and (not isinstance(c, ServeCommand) or c.online.mode != "decoupled"),
        "distill serve online=on, which starts the trainer itself",
    ),
    Rule(
        ("online.keep_versions", "online.metrics_s", "online.mode", "online"),
        lambda c: not isinstance(c, ReplayCommand | VersionsCommand),
        "distill serve; distill versions action=gc takes keep=N",
    ),
    Rule(("tracker",), lambda c: _learns_online(c) or c.tracker.kind == "none", LEARNING, unless="online=off"),
    *_of_choices(PROPOSERS, "engine", "engine.proposer", _proposers),
    Rule(("engine.selection", "engine.selection_options.*"), lambda c: bool(getattr(c, "drafts", ())), "drafts=[A,B]"),
    Rule(
        ("engine.selection", "engine.selection_options.*"),
        lambda c: not c.engine.joins_drafts,
        "engine.controller=goodput: with fixed all drafts that engine.proposer names draft together",
    ),
    *_of_choices(CONTROLLERS, "engine", "engine.controller", lambda c: [c.engine.controller]),
    Rule(("adapt.accepted_weight",), lambda c: c.adapt.positions == "weighted", "adapt.positions=weighted"),
    Rule(("adapt.offline",), lambda c: c.adapt.offline_share > 0, "adapt.offline_share, as in adapt.offline_share=0.2"),
    Rule(("adapt.replay_share",), lambda c: c.adapt.mode == "replay", "adapt.mode=replay"),
    Rule(("max_updates",), lambda c: not isinstance(c, AdaptCommand) or not c.once, "once=false"),
    Rule(("bench.timeout_s", "key_env"), lambda c: not isinstance(c, BenchCommand) or bool(c.urls), "url="),
    Rule(("tree", "widths"), lambda c: _simulates_trees(c, ()), "policies=[goodput]"),
    Rule(("nodes",), lambda c: _simulates_trees(c, ("topk-", "fork-")), "policies=[goodput]"),
    Rule(OF_THE_TRACE, lambda c: c.workload.trace is None, "workload.trace=null: a trace has times and lengths"),
    Rule(
        ("tenant",),
        lambda c: not isinstance(c, ReplayCommand) or c.action != "inspect",
        "action=exclude, include, export or delete",
    ),
    Rule(
        ("version",),
        lambda c: not isinstance(c, VersionsCommand) or c.action in ("show", "promote"),
        "action=show or action=promote",
    ),
    Rule(
        ("name",),
        lambda c: not isinstance(c, VersionsCommand) or c.action in ("rollback", "withdraw"),
        "action=rollback or action=withdraw",
    ),
    Rule(("keep",), lambda c: not isinstance(c, VersionsCommand) or c.action == "gc", "action=gc"),
)


def check_unused(config: Any, overrides: Sequence[str]) -> None:
    """Refuse settings that were typed and that nothing reads. `KEY=null` switches a setting off and is no mistake.

    Raises:
        ConfigError: naming the first of them and what it needs.
    """
    for word in overrides:
        key, _, value = word.lstrip("+").partition("=")
        if value == "null" or not hasattr(config, key.partition(".")[0]):
            continue
        for rule in RULES:
            if rule.names(key) and rule.unless not in overrides and not rule.holds(config):
                raise ConfigError(f"{word} needs {rule.needs}; it has no effect here")
