"""Settings that were typed and would have no effect beside the others: a mistake that is better told than ignored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distillspec.config.commands import EvalCommand, InitDraftCommand
from distillspec.errors import ConfigError

OF_THE_PROMPTS = (
    "data.prompts",
    "data.split",
    "data.prompt_field",
    "data.response_field",
    "data.domain_field",
    "data.num_prompts",
    "data.max_prompt_tokens",
)
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


@dataclass(frozen=True)
class Rule:
    """`keys` have an effect only where `holds` of the config, which `needs` says in words."""

    keys: tuple[str, ...]
    holds: Callable[[Any], bool]
    needs: str


def _samples(config: Any) -> bool:
    """Whether any text is sampled: without a stored signal, a file's responses do not choose a vocabulary."""
    return config.data.source != "fixed" or config.data.signal == "none" or isinstance(config, InitDraftCommand)


RULES = (
    Rule(("draft.layers",), lambda c: c.draft.kind != "pretrained", "draft=pruned or draft=scratch"),
    Rule(("data.mixed_lambda", "data.mixed_by", "data.mixed_with"), lambda c: c.data.source == "mixed", "data=mixed"),
    Rule(("data.mixed_with",), lambda c: c.data.mixed_by == "sequence", "data.mixed_by=sequence"),
    Rule(("data.refresh_steps", "data.refresh_keep"), lambda c: c.data.on_policy, "data=draft or data=mixed"),
    Rule(OF_THE_SAMPLES, lambda c: not isinstance(c, EvalCommand), "distill train or distill generate"),
    Rule(("data.temperature", "data.top_p"), _samples, "data=teacher, data=draft or data=mixed"),
    Rule(("data.signal_entries",), lambda c: c.data.signal != "none", "data.signal=topk or data.signal=sampled"),
    Rule(("data.tail_draws",), lambda c: c.data.signal == "topk", "data.signal=topk"),
    Rule(("data.batch_slots",), lambda c: c.data.generator == "slots", "data.generator=slots; use engine.max_slots"),
    Rule(OF_THE_PROMPTS, lambda c: c.data.cache is None, "data.cache=null: a cache brings its own prompts"),
    Rule(("loss.beta", "loss.kl", "loss.eta"), lambda c: c.loss.mix is None, "loss.mix=null: a mix has its own"),
    Rule(("loss.beta",), lambda c: c.loss.name in ("jsd", "jsd_kl"), "loss=jsd or loss=jsd_kl"),
    Rule(("loss.kl",), lambda c: c.loss.name == "jsd_kl", "loss=jsd_kl"),
    Rule(("loss.eta",), lambda c: c.loss.name == "lk_hybrid", "loss=lk_hybrid"),
    Rule(("loss.reference",), lambda c: c.loss.select_fraction is not None, "loss.select_fraction"),
    Rule(("train.decay_fraction",), lambda c: c.train.schedule == "wsd", "train.schedule=wsd"),
    Rule(
        ("train.eval_share",),
        lambda c: c.train.max_minutes is not None and c.train.eval_every is None,
        "train.max_minutes, and train.eval_every=null",
    ),
    Rule(("evaluation.cost_batches",), lambda c: c.evaluation.measure_cost, "evaluation.measure_cost=true"),
    Rule(
        ("evaluation.speedup_prompts", "evaluation.speedup_tokens"),
        lambda c: c.evaluation.measure_speedup,
        "evaluation.measure_speedup=true",
    ),
    Rule(
        ("tracker.project", "tracker.name", "tracker.tags"),
        lambda c: c.tracker.kind != "none",
        "tracker=wandb or tracker=tensorboard",
    ),
)


def check_unused(config: Any, overrides: Sequence[str]) -> None:
    """Refuse typed settings that nothing reads; those that are set to null are switched off, which is no mistake.

    Raises:
        ConfigError: naming the first of them and what it needs.
    """
    for word in overrides:
        key, _, value = word.lstrip("+").partition("=")
        if value == "null" or not hasattr(config, key.partition(".")[0]):
            continue
        for rule in RULES:
            if key in rule.keys and not rule.holds(config):
                raise ConfigError(f"{word} needs {rule.needs}; it has no effect here")
