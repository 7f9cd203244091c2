"""Tables of the choices that are made by name: losses, draft kinds, proposers and length controllers.

Allowed values, `--help`, the refusal of settings without effect and the loading of the code all derive from them. The
tables hold strings only: reading them imports nothing.

Add a choice in two steps.

1. Write its code in a file of its own, with keyword arguments (that have defaults) for parameters of its own:

   - loss: `formula(pair: BucketedPair, **params) -> Tensor [N]`, in nats; see `distillspec.losses.divergences`
   - draft kind: `make(config, target, layers: LayerSelection) -> LanguageModel`; see `distillspec.models.draft`
   - proposer: `make(parts: ProposerParts, **options) -> Proposer`; see `distillspec.serving.proposers.by_name`
   - controller: `make(parts: ControllerParts, **options) -> LengthController`; see
     `distillspec.serving.control.by_name`
   - selection: `make(parts: SelectionParts, **options) -> Selection`; see `distillspec.serving.selection.base`

2. Add one line to its table here: `"mine": LossChoice("my_package.mine:formula", "what it does")`.

Choose it by `loss=mine`, `draft=mine`, `engine.proposer=mine` or `engine.controller=mine`. Set its parameters with
`+loss.params.scale=2`, `+engine.proposer_options.scale=2`, `+engine.controller_options.scale=2`, or in a YAML file of
the group, as in `conf/loss/mine.yaml`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from distillspec.errors import ConfigError


@dataclass(frozen=True)
class Choice:
    """One value of a setting.

    `reads` names the settings of its group that have an effect with it, among those that some other choice ignores.
    `needs` names what must be there besides: `draft` (a draft model), `profile` (measured costs), `path`.
    """

    code: str  # MODULE:FUNCTION, imported when it is chosen
    about: str  # for --help
    reads: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def load(self) -> Any:
        """Import the code.

        Raises:
            ConfigError: the table names a module or function that does not exist.
        """
        module, _, name = self.code.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"cannot import {self.code}: {error}; see distillspec.config.registry") from error


@dataclass(frozen=True)
class LossChoice(Choice):
    """A loss. `reads` names its parameters that are settings of `loss`.

    `needs` says what it learns from: `distribution` (the target's, live or as a `topk` signal), `target` (tokens drawn
    from it are enough), `labels` (the next token), `draft_text` (text that the draft wrote). The code of a loss with
    `labels` takes `LossInputs` and returns a `PerTokenLoss`.
    """

    needs: tuple[str, ...] = ("distribution",)
    reference: str = ""  # MODULE:FUNCTION of its dense reference, empty: made from the formula


@dataclass(frozen=True)
class ProposerChoice(Choice):
    """A proposer. `without_draft` names the one that takes its place while there is no draft.

    `source` is what its trees call it, empty: its name. `alone`: it is no part of a list.
    """

    without_draft: str = "none"
    source: str = ""
    alone: bool = False


LOSSES: dict[str, LossChoice] = {
    "fkl": LossChoice(
        "distillspec.losses.divergences:forward_kl",
        "forward KL, KL(target ‖ draft)",
        needs=("target",),
        reference="distillspec.losses.divergences:fkl",
    ),
    "rkl": LossChoice(
        "distillspec.losses.divergences:reverse_kl",
        "reverse KL, KL(draft ‖ target)",
        reference="distillspec.losses.divergences:rkl",
    ),
    "jsd": LossChoice(
        "distillspec.losses.divergences:jensen_shannon",
        "generalised Jensen-Shannon divergence",
        reads=("beta",),
        reference="distillspec.losses.divergences:jsd",
    ),
    "jsd_kl": LossChoice(
        "distillspec.losses.divergences:jensen_shannon_and_kl",
        "jsd plus a share of forward KL; learns from any start",
        reads=("beta", "kl"),
        reference="distillspec.losses.divergences:jsd_kl",
    ),
    "tvd": LossChoice(
        "distillspec.losses.divergences:total_variation",
        "total variation distance, 1 − α",
        reference="distillspec.losses.divergences:tvd",
    ),
    "lk": LossChoice(
        "distillspec.losses.acceptance_direct:negative_log_acceptance",
        "−log α",
        reference="distillspec.losses.acceptance_direct:lk",
    ),
    "lk_hybrid": LossChoice(
        "distillspec.losses.acceptance_direct:adaptive_hybrid",
        "forward KL that gives way to tvd as α grows",
        reads=("eta",),
        reference="distillspec.losses.acceptance_direct:lk_hybrid",
    ),
    "ce": LossChoice(
        "distillspec.losses.sampled:hard_labels", "cross-entropy with the text, no target", needs=("labels",)
    ),
    "tvdpp": LossChoice(
        "distillspec.losses.sampled:policy_gradient",
        "policy gradient of tvd on text that the draft wrote",
        needs=("distribution", "labels", "draft_text"),
    ),
}

DRAFT_KINDS: dict[str, Choice] = {
    "pretrained": Choice(
        "distillspec.models.draft:make_pretrained",
        "start from draft.path",
        reads=("path", "features", "feature_ids"),
        needs=("path",),
    ),
    "pruned": Choice(
        "distillspec.models.draft:make_pruned",
        "some of the target's layers",
        reads=("layers", "keep", "select", "features", "feature_ids"),
    ),
    "scratch": Choice(
        "distillspec.models.draft:make_scratch",
        "a small random Llama",
        reads=("layers", "hidden_size", "heads"),
    ),
    "eagle": Choice(
        "distillspec.models.draft:make_eagle",
        "a layer on the target's hidden states (EAGLE-3)",
        reads=("layers", "feature_ids", "state_norms"),
    ),
    "block": Choice(
        "distillspec.models.draft:make_block",
        "a layer on the target's hidden states that drafts a block in one pass (DFlash)",
        reads=("layers", "feature_ids", "positions", "markov", "confidence", "bidirectional", "shared_mask"),
    ),
    "medusa": Choice(
        "distillspec.models.draft:make_medusa",
        "a head a drafted token on the target's last state (Medusa, Hydra)",
        reads=("positions", "sequential", "feature_ids", "train_target"),
    ),
}

OF_TREES = ("tree", "widths", "nodes")  # settings of drafted trees
PROPOSERS: dict[str, ProposerChoice] = {
    "none": ProposerChoice("distillspec.serving.proposers.by_name:make_none", "no speculation", alone=True),
    "draft_model": ProposerChoice(
        "distillspec.serving.proposers.by_name:make_draft_model",
        "the draft",
        reads=("draft_confidence", *OF_TREES),
        needs=("draft",),
        source="draft",
    ),
    "prompt_lookup": ProposerChoice(
        "distillspec.serving.proposers.by_name:make_prompt_lookup",
        "what followed the last tokens earlier in the text",
        without_draft="prompt_lookup",
        source="lookup",
    ),
    "lookup_else_model": ProposerChoice(
        "distillspec.serving.proposers.by_name:make_lookup_else_model",
        "prompt_lookup or the draft",
        reads=("draft_confidence", *OF_TREES),
        needs=("draft",),
        without_draft="prompt_lookup",
        alone=True,
    ),
    "suffix": ProposerChoice(
        "distillspec.serving.proposers.by_name:make_suffix",
        "what followed the last tokens in the text and in earlier answers of the tenant, in trees",
        reads=OF_TREES,
        without_draft="suffix",
    ),
    "recycling": ProposerChoice(
        "distillspec.serving.proposers.by_name:make_recycling",
        "what the target found probable behind the last token before, in trees",
        reads=OF_TREES,
        without_draft="recycling",
        source="recycled",
    ),
    "ngram": ProposerChoice(
        "distillspec.serving.proposers.by_name:make_ngram",
        "what followed the last tokens in the tenant's texts so far, in trees",
        reads=OF_TREES,
        without_draft="ngram",
    ),
    "staged": ProposerChoice(
        "distillspec.serving.proposers.by_name:make_staged",
        "the draft, in fewer passes where a proposer without a model guesses its tokens",
        reads=("draft_confidence", *OF_TREES),
        needs=("draft",),
        alone=True,
    ),
    "suffix_else_model": ProposerChoice(
        "distillspec.serving.proposers.by_name:make_suffix_else_model",
        "suffix or the draft",
        reads=("draft_confidence", *OF_TREES),
        needs=("draft",),
        without_draft="suffix",
        alone=True,
    ),
}

# The proposers of engines whose settings name none. N-grams stand beside an only draft where goodput plans the nodes of
# each request.
DRAFT_ALONE, WITHOUT_DRAFT = "draft_model", "none"
BESIDE_DRAFT = ("ngram", DRAFT_ALONE)

CONTROLLERS: dict[str, Choice] = {
    "fixed": Choice("distillspec.serving.control.by_name:make_fixed", "speculation_length for every row"),
    "goodput": Choice(
        "distillspec.serving.control.by_name:make_goodput",
        "most expected tokens a second, by row and step",
        reads=("lengths", "max_time_per_token_s", "profile"),
    ),
    "smartspec": Choice(
        "distillspec.serving.baselines.smartspec:make_smartspec",
        "SmartSpec as in its paper",
        reads=("profile",),
        needs=("profile",),
    ),
}

SELECTIONS: dict[str, Choice] = {
    "goodput": Choice(
        "distillspec.serving.selection.goodput:GoodputSelection",
        "most expected tokens a second, by domain, prompt, place in the answer and its own trials",
    ),
    "lbss": Choice("distillspec.serving.selection.lbss:Lbss", "SPIN's: explore in chunks, match, exploit 2^k steps"),
    "fixed": Choice("distillspec.serving.selection.baselines:Fixed", "one draft for all"),
    "random": Choice("distillspec.serving.selection.baselines:Drawn", "a drawn one for each request"),
    "epsilon_greedy": Choice(
        "distillspec.serving.selection.baselines:EpsilonGreedy", "the best so far, for a share of requests a drawn one"
    ),
    "prompt_length": Choice(
        "distillspec.serving.selection.baselines:ByPromptLength", "the longer the prompt, the dearer the draft"
    ),
    "lookup_else_model": Choice(
        "distillspec.serving.selection.baselines:LookupElseModel",
        "a proposer without a model where it has tokens, else the first draft",
    ),
}

# Group of YAML files → the setting that a choice sets and its table. `loss=NAME` works without a file.
GROUPS: dict[str, tuple[str, Mapping[str, Choice]]] = {"loss": ("name", LOSSES), "draft": ("kind", DRAFT_KINDS)}


def find(key: str, name: str, table: Mapping[str, Choice]) -> Choice:
    """Return the choice `name` of the setting `key`.

    Raises:
        ConfigError: the name is not in the table. The line lists those that are.
    """
    if name not in table:
        raise ConfigError(f"{key}={name} is not known; use one of {', '.join(table)}")
    return table[name]


def choices_that(table: Mapping[str, Choice], *, read: str) -> list[str]:
    """Return the names of the choices that use the setting `read`."""
    return [name for name, choice in table.items() if read in choice.reads]


def options_of(make: Callable[..., Any]) -> list[str]:
    """Return the names of the keyword arguments after the first: a choice's own parameters."""
    return list(inspect.signature(make).parameters)[1:]


def check_options(key: str, name: str, make: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option that the choice `name` does not have."""
    known = options_of(make)
    for option in options:
        if option not in known:
            raise ConfigError(f"{key}: {name} has no option {option!r}; it has: {', '.join(known) or 'none'}")
