"""Settings of the target and the draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distillspec.config.checks import chosen_from, list_of, one_of, require
from distillspec.config.registry import DRAFT_KINDS, find


@dataclass
class TargetConfig:
    """The model to be served."""

    path: str = "smollm2"  # smollm2, tiny, a Hub id, a folder or a .gguf file
    dtype: str = "auto"  # auto (bfloat16 where the hardware has it) | float32 | bfloat16 | float16 | float64
    device: str = "auto"  # auto | cpu | cuda | cuda:1 …

    def __post_init__(self) -> None:
        one_of("target.dtype", self.dtype, ("auto", "float32", "bfloat16", "float16", "float64"))
        require(bool(self.path), "target.path is empty; give a Hub id, a folder, a .gguf file or smollm2")


@dataclass
class DraftConfig:
    """The model to be trained."""

    kind: str = chosen_from(DRAFT_KINDS, "pruned")
    path: str | None = None  # pretrained: Hub id, folder, or the run folder of an earlier draft
    layers: int | None = None  # pruned, scratch, eagle, block: number of layers; null: 4, of eagle and block 1
    keep: list[int] | None = None  # pruned: numbers of the target's layers to keep
    select: str = "even"  # pruned: even (evenly spaced layers) | acceptance (the layers that keep α highest)
    vocabulary: int | None = None  # number of output tokens that are kept; null: all
    hidden_size: int = 256  # scratch: width
    heads: int = 4  # scratch: attention heads
    features: bool = False  # pruned, pretrained: read the target's hidden states too
    feature_ids: list[int] | None = None  # states that the draft reads; null: 2, L / 2, L − 1 (medusa L)
    state_norms: bool = False  # eagle: norm each state before they are fused; no other engine loads such drafts
    positions: int = 4  # medusa, block: the most tokens to draft at once
    markov: int = 64  # block: width of what the head reads of the token before; 0: nothing
    confidence: bool = False  # block: learn what will be accepted, for engine.draft_confidence
    bidirectional: bool = False  # block: masks see each other in both directions (DFlash); slower on CPUs
    shared_mask: bool = False  # block: one mask for all positions, as vLLM and speculators hold blocks (P-EAGLE)
    sequential: bool = False  # medusa: heads read the tokens drafted before too (Hydra)
    train_target: bool = False  # medusa: train the target with the heads, which makes another target (Medusa-2)
    train_embeddings: bool = False  # train the input embeddings too; tied ones always learn

    @property
    def reads_states(self) -> bool:
        """True if a new draft of this kind reads the target's states."""
        reads = find("draft.kind", self.kind, DRAFT_KINDS).reads
        return self.features or ("feature_ids" in reads and "features" not in reads)

    def trained_positions(self, unroll: int) -> int | None:
        """Return how many drafted positions a new draft trains: its own, or `unroll`. None: it is made already."""
        kind = find("draft.kind", self.kind, DRAFT_KINDS)
        return None if "path" in kind.reads else self.positions if "positions" in kind.reads else unroll

    @property
    def records_states(self) -> bool:
        """True if training reads states that can be stored: those of a target that does not change."""
        return self.reads_states and not self.train_target

    def __post_init__(self) -> None:
        kind = find("draft.kind", self.kind, DRAFT_KINDS)
        one_of("draft.select", self.select, ("even", "acceptance"))
        require("path" not in kind.needs or bool(self.path), f"draft={self.kind} needs draft.path=FOLDER_OR_ID")
        require(
            "path" in kind.reads or self.path is None,
            f"draft.path={self.path} has no part in draft={self.kind}; add draft=pretrained to start from it",
        )
        require(
            "keep" in kind.reads or self.keep is None,
            f"draft.keep={self.keep} names the target's layers: use draft=pruned",
        )
        require(
            self.select == "even" or ("select" in kind.reads and self.keep is None),
            f"draft.select={self.select} chooses among the target's layers: use draft=pruned without draft.keep",
        )
        require(
            not self.features or "features" in kind.reads,
            f"draft.features=true adds the target's states to draft=pruned or draft=pretrained, not {self.kind}",
        )
        if self.feature_ids is not None:
            require(
                self.features or "features" not in kind.reads,
                f"draft.feature_ids={self.feature_ids} has no part without draft.features=true",
            )
            list_of("draft.feature_ids", self.feature_ids, (int,), "numbers of states")
            require(len(self.feature_ids) > 0, "draft.feature_ids=[] names no state; leave it out for the default")
        if self.layers is not None:
            require(self.layers >= 1, f"draft.layers={self.layers} is impossible; keep at least 1 layer")
        if self.keep is not None:
            list_of("draft.keep", self.keep, (int,), "layer numbers")
            require(len(self.keep) > 0, "draft.keep=[] keeps no layer; name at least one")
            require(
                len(set(self.keep)) == len(self.keep) and min(self.keep) >= 0,
                f"draft.keep={self.keep} must be distinct layer numbers from 0",
            )
            require(
                self.layers is None or self.layers == len(self.keep),
                f"draft.layers={self.layers} and draft.keep={self.keep} disagree; give one of them",
            )
        if self.vocabulary is not None:
            require(
                self.vocabulary >= 16,
                f"draft.vocabulary={self.vocabulary} is too small; keep at least 16 tokens",
            )
        require(
            self.heads >= 1 and self.hidden_size >= 1 and self.hidden_size % (2 * self.heads) == 0,
            f"draft.hidden_size={self.hidden_size} must be an even multiple of draft.heads={self.heads}",
        )
        require(self.markov >= 0, f"draft.markov={self.markov} is no width; 0 leaves the Markov head out")
        require(self.positions >= 1, f"draft.positions={self.positions} is impossible; draft at least 1 token")
        for key, made_by in {
            "hidden_size": "scratch",
            "heads": "scratch",
            "state_norms": "eagle",
            "positions": "medusa",
            "markov": "block",
            "confidence": "block",
            "bidirectional": "block",
            "shared_mask": "block",
            "sequential": "medusa",
            "train_target": "medusa",
        }.items():
            value = getattr(self, key)
            require(
                key in kind.reads or value == getattr(DraftConfig, key),
                f"draft.{key}={value} has no part in draft={self.kind}; add draft={made_by}",
            )


@dataclass
class DraftPathConfig:
    """A finished draft."""

    path: str | None = None  # its folder, or the run that made it


@dataclass
class ServedDraftConfig(DraftPathConfig):
    """A finished draft, and where it runs."""

    device: str | None = None  # cuda:1 …, of all drafts; null: the target's


def check_drafts(draft: DraftPathConfig, drafts: Sequence[str]) -> None:
    """Refuse one draft beside several, and paths that are none.

    Raises:
        ConfigError: names the setting.
    """
    list_of("drafts", drafts, (str,), "folders")
    require(all(drafts), "drafts=[…] has an empty path; name a folder or a run each")
    require(
        not drafts or draft.path is None,
        f"draft.path={draft.path} names one draft and drafts= several; put all of them into drafts=[…]",
    )
