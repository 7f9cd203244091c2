"""The target and the draft."""

from __future__ import annotations

from dataclasses import dataclass

from distillspec.config.checks import list_of, one_of, require


@dataclass
class TargetConfig:
    """The model to be served. `path`: `smollm2`, `tiny`, a Hub id, a local folder or a .gguf file."""

    path: str = "smollm2"
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16 | float64
    device: str = "auto"

    def __post_init__(self) -> None:
        one_of("target.dtype", self.dtype, ("auto", "float32", "bfloat16", "float16", "float64"))
        require(bool(self.path), "target.path is empty; give a Hub id, a folder, a .gguf file or smollm2")


@dataclass
class DraftConfig:
    """The model to be trained. `kind`: pretrained | pruned | scratch."""

    kind: str = "pruned"
    path: str | None = None  # pretrained: Hub id, folder, or the run folder of an earlier draft
    layers: int | None = None  # pruned, scratch: how many layers
    keep: list[int] | None = None  # pruned: exactly these layers of the target
    select: str = "even"  # pruned: even | acceptance
    vocabulary: int | None = None  # keep only this many output tokens; null keeps all
    hidden_size: int = 256  # scratch
    heads: int = 4  # scratch
    train_embeddings: bool = False  # whether the input embeddings learn too; always where they are the head (tied)

    def __post_init__(self) -> None:
        one_of("draft.kind", self.kind, ("pretrained", "pruned", "scratch"))
        one_of("draft.select", self.select, ("even", "acceptance"))
        require(self.kind != "pretrained" or bool(self.path), "draft=pretrained needs draft.path=FOLDER_OR_ID")
        require(
            self.kind == "pretrained" or self.path is None,
            f"draft.path={self.path} has no part in draft={self.kind}; add draft=pretrained to start from it",
        )
        require(
            self.kind == "pruned" or self.keep is None,
            f"draft.keep={self.keep} names the target's layers: use draft=pruned",
        )
        require(
            self.select == "even" or (self.kind == "pruned" and self.keep is None),
            f"draft.select={self.select} chooses among the target's layers: use draft=pruned without draft.keep",
        )
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
        for key in ("hidden_size", "heads"):
            value = getattr(self, key)
            require(
                self.kind == "scratch" or value == getattr(DraftConfig, key),
                f"draft.{key}={value} shapes a draft from scratch: add draft=scratch",
            )


@dataclass
class DraftPathConfig:
    """A finished draft: its folder, or the run that made it."""

    path: str | None = None
