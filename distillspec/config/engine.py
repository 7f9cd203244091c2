"""Settings of the engine: the group `engine`, and `EngineSettings` of `distillspec.serving`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any

from distillspec.config.checks import chosen_from, one_of, require
from distillspec.config.registry import (
    BESIDE_DRAFT,
    CONTROLLERS,
    DRAFT_ALONE,
    PROPOSERS,
    SELECTIONS,
    ProposerChoice,
    choices_that,
    find,
)

OFFLINE_PREFILL = 2048  # prompt tokens a step where time to first token does not matter
ATTENTIONS = ("auto", "masked", "split", "native", "triton", "varlen")
LENGTHS = ("request", "step", "global")
EXACT = ("exact", "exact_by_token")
VERIFICATIONS = (*EXACT, "typical", "target_initialised")
TREES = ("off", "sampled", "topk", "dynamic", "medusa", "fork", "given")
ONE_HOT = ("topk", "dynamic", "medusa")  # children are the most probable tokens. Those of other trees are drawn
CUT = ("dynamic", "medusa")  # of all nodes that widths allow, the best
WIDTHS = {"sampled": 3, "topk": 3, "dynamic": 8, "medusa": 8}  # the most children of a node, where none are set


@dataclass
class EngineConfig:
    """The engine that runs target and draft."""

    max_slots: int = 16  # the most requests at a time; fewer where memory is short
    max_model_len: int | None = None  # tokens of prompt and output; null: as the model allows, at most 4,096
    cache_gib: float | None = None  # memory for the KV caches of target and draft; null: half of the free memory
    max_cache_tokens: int | None = None  # tokens that all slots may hold together; null: as memory allows
    page_tokens: int | None = None  # tokens of a page of the KV caches; null: 16 on CUDA with triton, else 0: no pages
    prefill_chunk: int = 512  # prompt tokens read per step; decoding goes on between the chunks of a long prompt
    prefill_slowdown: float | None = None  # share that reading prompts may add to a step of decoding rows; null: any
    prefix_reuse: bool = True  # reuse the KV cache of a prefix that prompts share
    proposer: Any = field(default=None, metadata={"choices": PROPOSERS})  # or a list, drafts too; null: ngram, draft
    proposer_options: dict[str, Any] = field(default_factory=dict)  # its parameters; of a list: by name
    controller: str = chosen_from(CONTROLLERS, "goodput")  # chooses the lengths
    controller_options: dict[str, Any] = field(default_factory=dict)  # parameters of a controller of your own
    selection: str = chosen_from(SELECTIONS, "goodput")  # of several drafts, chooses each request's
    selection_options: dict[str, Any] = field(default_factory=dict)  # its parameters
    speculation_length: int = 4  # levels that are drafted per row and step; the most where the controller chooses
    tree: str | None = None  # off | sampled | topk | dynamic | medusa | fork | given; null: sampled (CUDA graphs: off)
    widths: list[int] = field(default_factory=list)  # the most children of a node, by level; empty: the tree's default
    nodes: int = 32  # the most tokens of a source's tree
    verification: str = "exact"  # exact | exact_by_token | typical, target_initialised: these two change answers
    micro_batches: int = 1  # parts of a step, one drafted while another is verified; 0: as many as pay
    lengths: str = "request"  # goodput: a length a request | a step (one for all rows) | global (one acceptance, too)
    max_time_per_token_s: float | None = None  # goodput: bound on a request's expected seconds per output token
    profile: str | None = None  # folder or file of `distill profile`; null: costs are measured, or kept ones used
    measure_costs_s: float = 2.0  # goodput without a profile: the most seconds to time passes at the start; 0: none
    draft_confidence: float = 0.0  # stop drafting at this best probability, or predicted acceptance; 0: never
    attention: str = "auto"  # masked | split | native (CPU) | triton | varlen | auto: the best that works, else masked
    cuda_graphs: bool = True  # CUDA: passes of few tokens run as recorded graphs, one a shape
    compile: bool | str = "auto"  # compile passes: auto (CPU: in the background, once it pays) | true (first) | false
    pack_weights: bool = True  # CPU: a second copy of the weights, packed for speed, where a trial finds it faster
    feature_ids: list[int] = field(default_factory=list)  # keep the target's hidden states after so many layers
    seed: int = 0  # seed of requests without one

    def __post_init__(self) -> None:
        for name in ("max_slots", "prefill_chunk"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        for name in ("max_model_len", "max_cache_tokens"):
            value = getattr(self, name)
            require(value is None or value >= 2, f"{name}={value} must be at least 2")
        share = self.prefill_slowdown
        require(share is None or share > 0, f"prefill_slowdown={share} must be above 0, or null")
        pages = self.page_tokens
        require(pages is None or pages >= 0, f"page_tokens={pages} must be at least 0")
        require(self.cache_gib is None or self.cache_gib > 0, f"cache_gib={self.cache_gib} must be above 0")
        self._check_proposers()
        one_of("attention", self.attention, ATTENTIONS)
        one_of("lengths", self.lengths, LENGTHS)
        find("selection", self.selection, SELECTIONS)
        controller = find("controller", self.controller, CONTROLLERS)
        for name in ("lengths", "max_time_per_token_s"):
            value, default = getattr(self, name), getattr(type(self), name)
            require(
                value == default or name in controller.reads,
                f"{name}={value} needs controller={' or '.join(choices_that(CONTROLLERS, read=name))}, "
                f"not {self.controller}",
            )
        require(self.speculation_length >= 0, f"speculation_length={self.speculation_length} must be at least 0")
        bound = self.max_time_per_token_s
        require(bound is None or bound > 0, f"max_time_per_token_s={bound} must be above 0 seconds")
        require(
            self.profile is not None or "profile" not in controller.needs,
            f"controller={self.controller} needs profile=FOLDER: measure this machine with distill profile",
        )
        require(
            self.profile is None or "profile" in controller.reads,
            f"profile={self.profile} is not used by controller={self.controller}; "
            "add controller=goodput, or leave it out",
        )
        seconds = self.measure_costs_s
        require(0 <= seconds < float("inf"), f"measure_costs_s={seconds} must be finite and at least 0 seconds")
        require(self.micro_batches >= 0, f"micro_batches={self.micro_batches} must be at least 0")
        require(0 <= self.draft_confidence < 1, f"draft_confidence={self.draft_confidence} must be in [0, 1)")
        require(self.compile in (True, False, "auto"), f"compile={self.compile} must be auto, true or false")
        require(self.seed >= 0, f"engine seed={self.seed} must be at least 0")
        self._check_tree()
        self._check_verification()

    @property
    def proposers(self) -> tuple[str, ...]:
        """The chosen proposers, in the order in which their tokens are tried. Empty: the default."""
        if self.proposer is None:
            return ()
        return (self.proposer,) if isinstance(self.proposer, str) else tuple(map(str, self.proposer))

    @property
    def named_drafts(self) -> tuple[str, ...]:
        """The proposers that are drafts of a pool, by name."""
        return tuple(name for name in self.proposers if name not in PROPOSERS)

    @property
    def joins_drafts(self) -> bool:
        """True if several drafts of a pool draft for each request, in one tree. Else each request gets one."""
        return bool(self.named_drafts) and self.controller == "fixed"

    @property
    def proposer_kinds(self) -> tuple[str, ...]:
        """The proposers of an engine with drafts, by their names in the table."""
        return tuple(name if name in PROPOSERS else DRAFT_ALONE for name in self.proposers_with_draft)

    @property
    def proposers_with_draft(self) -> tuple[str, ...]:
        """The proposers of an engine with one draft."""
        plans_nodes = self.controller == "goodput" and self.lengths == "request"
        return self.proposers or (BESIDE_DRAFT if plans_nodes else (DRAFT_ALONE,))

    def most_widths(self, speculation_length: int) -> tuple[int, ...]:
        """Return the most children of a node at each level. 1 at each: chains."""
        if self.chosen_tree == "given":
            return tuple(self.widths)[:speculation_length]
        widths = self.widths or [self.widest] * speculation_length
        return (*widths, *[1] * speculation_length)[:speculation_length]

    @property
    def is_exact(self) -> bool:
        """True if every answer has the target's distribution."""
        return self.verification in EXACT

    @property
    def roots(self) -> int:
        """Tokens of the target that a tree starts with."""
        return self.widths[0] if self.verification == "target_initialised" else 1

    @property
    def widest(self) -> int:
        """The most children of any node."""
        return max(self.widths, default=WIDTHS.get(self.chosen_tree, 1))

    @property
    def chosen_tree(self) -> str:
        """The kind of trees."""
        return self.tree or "sampled"

    def _check_proposers(self) -> None:
        names, drafts = self.proposers, self.named_drafts
        require(self.proposer is None or bool(names), "proposer=[] names none; leave it out, or give proposer=none")
        alone = [name for name in names if proposer_choice(name).alone]
        require(
            len(names) == 1 or not alone,
            f"proposer={list(names)}: {', '.join(alone)} stands alone; name the others themselves",
        )
        require(len(set(names)) == len(names), f"proposer={list(names)} names one twice")
        require(
            not drafts or DRAFT_ALONE not in names,
            f"proposer={list(names)}: {DRAFT_ALONE} is the one draft that engine.selection chooses; name it, or drafts "
            "themselves",
        )
        self.check_options_by_name(names)

    def check_options_by_name(self, names: Sequence[str]) -> None:
        """Refuse options of others than these proposers, where there are several.

        Raises:
            ConfigError: names the options and the proposers.
        """
        others = [name for name in self.proposer_options if len(names) > 1 and name not in names]
        require(
            not others,
            f"proposer_options.{', '.join(others)} is of none in {list(names)}; several have options by "
            "name, as in 'proposer_options={suffix:{tokens:90000}}'",
        )

    def _check_tree(self) -> None:
        tree, widths, most = self.chosen_tree, self.widths, self.speculation_length
        one_of("tree", tree, TREES)
        drafts = not self.proposers or any("draft" in proposer_choice(name).needs for name in self.proposers)
        require(
            tree != "medusa" or drafts,
            f"tree=medusa is of a draft's heads, and proposer={self.proposer} uses no draft; use tree=topk, or "
            "proposer=draft_model",
        )
        require(self.nodes >= 1, f"nodes={self.nodes} must be at least 1")
        require(min(widths, default=1) >= 1, f"widths={widths} must be at least 1 each")
        require(not widths or tree != "off", f"widths={widths} need a tree, not tree=off")
        levels = len(widths)
        require(
            levels <= most,
            f"widths={widths} are of {levels} levels, above speculation_length={most}; raise it to {levels}",
        )
        if tree == "fork":
            require(levels == 1, f"tree=fork needs widths=[W], its branches, not widths={widths}")
        elif tree == "given":
            wanted = "widths=[4,2,…], the children of a node at each level"
            require(levels > 0, f"tree=given needs {wanted}, not widths={widths}")
        elif self.controller != "fixed" or not widths or tree in CUT:
            return
        nodes = sum(accumulate(self.most_widths(most), mul))
        require(
            nodes <= self.nodes,
            f"tree={tree} with widths={widths} has {nodes} tokens, above nodes={self.nodes}; "
            f"give nodes={nodes}, or smaller widths",
        )

    def _check_verification(self) -> None:
        one_of("verification", self.verification, VERIFICATIONS)
        if self.verification != "target_initialised":
            return
        require(
            self.chosen_tree == "given" and self.controller == "fixed",
            "verification=target_initialised needs controller=fixed tree=given widths=[2,4,…]: the first width counts "
            "the target's own tokens that a tree starts with",
        )
        require(
            self.proposers in ((), ("draft_model",)),
            f"verification=target_initialised needs proposer=draft_model, not {self.proposer}: others know nothing "
            "behind the target's tokens",
        )


def proposer_choice(name: str) -> ProposerChoice:
    """Return the choice of one of `engine.proposer`. A name that is not in the table is a draft's."""
    return PROPOSERS.get(name, PROPOSERS[DRAFT_ALONE])


def check_named_drafts(engine: EngineConfig, drafts: Collection[str]) -> None:
    """Refuse proposers that are neither in the table nor drafts.

    Args:
        drafts: names of the drafts that there are.

    Raises:
        ConfigError: names the first of them, and what there is.
    """
    for name in engine.named_drafts:
        others = f", or a draft: {', '.join(drafts)}" if drafts else ", or name drafts of drafts=[A,B]"
        require(name in drafts, f"proposer={name} is not known; use one of {', '.join(PROPOSERS)}{others}")


@dataclass
class SamplingEngineConfig:
    """The engine that samples with data.generator=engine. It is made for each batch of prompts, to their lengths."""

    max_slots: int = 64  # the most answers written side by side; fewer where memory is short
    speculation_length: int = 0  # the most tokens that the draft in training drafts for the target; 0: none

    def __post_init__(self) -> None:
        require(self.max_slots >= 1, f"engine.max_slots={self.max_slots} must be at least 1")
        require(self.speculation_length >= 0, f"engine.speculation_length={self.speculation_length} must be at least 0")

    @property
    def settings(self) -> EngineConfig:
        """The engine's settings, as in conf/engine/offline.yaml: throughput counts, time to first token does not."""
        return EngineConfig(
            max_slots=self.max_slots,
            prefill_chunk=OFFLINE_PREFILL,
            prefix_reuse=False,
            speculation_length=self.speculation_length,
        )
