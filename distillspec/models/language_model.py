"""A transformers model with its identity, output head and kept vocabulary."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from distillspec.errors import ConfigError
from distillspec.models.state_input import ADDED, BLOCK, StateInput, deferred_norm
from distillspec.models.stop_head import StopHead
from distillspec.types import ModelIdentity, OutputHead


@dataclass(frozen=True)
class LanguageModel:
    """A target or a draft.

    `kept_ids [Vd]` (int64, sorted) are the absolute ids of the head's rows when the vocabulary is truncated. None: the
    head covers the whole vocabulary. Ids that the tokenizer cannot produce (rows that pad the head to a round size) are
    cut off, so all logits are `identity.vocab_size` or `len(kept_ids)` wide. A model folder may lack a tokenizer: such
    a model reads and writes token ids only. `stop_head` tells which tokens of a draft are accepted. `evaluated` is the
    acceptance rate that a draft's own run measured on held-out text, `rank_acceptance` that of heads by drafted
    position and rank (`EvaluationResult`).
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    identity: ModelIdentity
    name: str
    kept_ids: Tensor | None = None
    lineage: dict[str, Any] = field(default_factory=dict)
    stop_head: StopHead | None = None
    evaluated: float | None = None
    rank_acceptance: tuple[tuple[float, ...], ...] = ()

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def decoder(self) -> nn.Module:
        """Return the model without its head."""
        return self.model.get_decoder()

    @property
    def layers(self) -> nn.ModuleList:
        """Return the decoder's blocks, under whatever name the architecture gives them."""
        return decoder_layers(self.decoder)

    @property
    def head(self) -> OutputHead:
        return output_head(self.model, self.identity.vocab_size, self.kept_ids)

    @property
    def width(self) -> int:
        """Return the number of logits that the head gives."""
        return self.identity.vocab_size if self.kept_ids is None else int(self.kept_ids.numel())

    @property
    def longest_text(self) -> int | None:
        """Return the most tokens of a text that the model reads, None where its configuration names no limit."""
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return None if limit is None else int(limit)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Return the ids that end a response: the tokenizer's end of sequence and the generation config's.

        Those outside the vocabulary (a stray −1, a head narrower than the tokenizer) are never written.
        """
        configured = self.model.generation_config.eos_token_id if self.model.generation_config else None
        ids = configured if isinstance(configured, list) else [configured]
        eos_id = None if self.tokenizer is None else self.tokenizer.eos_token_id
        return tuple(sorted({int(i) for i in [*ids, eos_id] if i is not None and 0 <= i < self.identity.vocab_size}))

    @property
    def kind(self) -> str:
        """Return how a draft was made, and if it reads the target's states beside the tokens."""
        made = str(self.lineage.get("kind", "pretrained"))
        if self.lineage.get("sequential"):
            return f"{made}, sequential"
        return f"{made}, features" if self.state_input is not None and self.state_input.way == ADDED else made

    @property
    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer, for callers that read or write text.

        Raises:
            ConfigError: the model has none.
        """
        if self.tokenizer is None:
            raise ConfigError(
                f"{self.name} has no tokenizer, so it cannot read text; add its tokenizer files to the model folder "
                "(the engine and /v1/completions take token ids without one)"
            )
        return self.tokenizer

    @property
    def state_input(self) -> StateInput | None:
        """Return the input of a draft that reads the target's states, None for other models."""
        return getattr(self.model, "state_input", None)

    @property
    def state_ids(self) -> tuple[int, ...]:
        """Return the states of the target that the model reads, () for models that read tokens alone."""
        return () if self.state_input is None else self.state_input.state_ids

    @property
    def attends(self) -> bool:
        """Return True if the model has attention, and so keys and values of a text."""
        return self.state_input is None or self.state_input.attends

    @property
    def most_positions(self) -> int | None:
        """Return the most tokens that the model can draft at once, None for any number."""
        if self.drafts_block:
            return int(self.state_input.positions)  # type: ignore[union-attr, arg-type]
        return None if self.attends else len(self.layers)

    @property
    def drafts_block(self) -> bool:
        """Return True if one pass gives all drafted positions."""
        return self.state_input is not None and self.state_input.way == BLOCK

    @property
    def sees_both_ways(self) -> bool:
        """Return True if the masks of a block see each other in both directions."""
        return bool(getattr(self.state_input, "bidirectional", False))

    def hidden(self, input_ids: Tensor, position_ids: Tensor, fed: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Return final hidden states `[B, L, D]`. Position ids that restart at 0 start a new packed sequence.

        Args:
            fed: see `last_states`.
        """
        return self.head_input(self.last_states(input_ids, position_ids, fed, **kwargs), 0, input_ids)

    def last_states(self, input_ids: Tensor, position_ids: Tensor, fed: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Return the states `[B, L, D]` of the last layer, before the final norm if the model reads states.

        Args:
            fed: `[B, L, D]`, for a model that reads states: those of the tokens before. None: zeros.
        """
        kwargs = {"use_cache": False, **kwargs}
        if self.state_input is None:
            inputs = {"input_ids": input_ids}
        else:
            embeddings = self.model.get_input_embeddings()(input_ids.clamp(min=0))
            states = torch.zeros_like(embeddings) if fed is None else fed
            inputs = {"inputs_embeds": self.state_input(embeddings, states, input_ids)}
        return self.decoder(**inputs, position_ids=position_ids, **kwargs).last_hidden_state

    def normed(self, states: Tensor) -> Tensor:
        """Return what the head reads of `last_states`."""
        return states if self.state_input is None else deferred_norm(self.decoder)(states)

    def head_input(self, carried: Tensor, position: int = 0, newest: Tensor | None = None) -> Tensor:
        """Return what the head reads at a drafted position.

        Args:
            carried: `[n, …]` what the draft's passes carry from position to position: last states `[n, D]` here.
            position: number of the drafted position, the first is 0.
            newest: `[n]` int64 the tokens before it.
        """
        states = self.normed(carried)
        if not self.attends:
            states = self.layers[position].read(states)  # type: ignore[operator]
        if not self.drafts_block:
            return states
        newest = None if newest is None else self.model.get_input_embeddings()(newest)
        read: Tensor = self.state_input.head_input(states, newest)  # type: ignore[union-attr, operator]
        return read

    @property
    def has_confidence_head(self) -> bool:
        """Return True if a confidence head tells how probable it is that each drafted token is accepted."""
        return getattr(self.state_input, "confidence", None) is not None

    def predicted_acceptance(self, carried: Tensor) -> Tensor:
        """Return the confidence head's probabilities `[…]` float32 that drafted tokens are accepted.

        Args:
            carried: `[…, D]` last states of the drafted positions.
        """
        return torch.sigmoid(self.state_input.confidence_logits(self.normed(carried)))  # type: ignore[union-attr, operator]

    def logits(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return logits `[B, L, width]` of `input_ids [B, L]`. Columns follow `kept_ids`, if there are any."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        return self.head.logits(self.hidden(input_ids, position_ids))

    def absolute_ids(self, columns: Tensor) -> Tensor:
        """Return the vocabulary ids of head columns."""
        return columns if self.kept_ids is None else self.kept_ids.to(columns.device)[columns]

    def full_width(self, logits: Tensor) -> Tensor:
        """Return logits over the whole vocabulary, −inf where the head has no row."""
        if self.kept_ids is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.identity.vocab_size), float("-inf"))
        return full.index_copy(-1, self.kept_ids.to(logits.device), logits)

    def with_identity(self, **changes: Any) -> LanguageModel:
        return replace(self, identity=replace(self.identity, **changes))


class AttentionHeads(NamedTuple):
    """Number of query heads, number of key heads that groups of them share, and the width of each head."""

    query: int
    kv: int
    dim: int


def attention_heads(model: LanguageModel) -> AttentionHeads:
    """Read the heads from the configuration, where fewer key heads and a head width of its own are optional."""
    config = model.model.config.get_text_config()
    query = config.num_attention_heads
    kv = getattr(config, "num_key_value_heads", None) or query
    return AttentionHeads(query, kv, getattr(config, "head_dim", None) or config.hidden_size // query)


def decoder_layers(decoder: nn.Module) -> nn.ModuleList:
    """Return the one ModuleList of transformer blocks directly under `decoder` (`layers`, `h`, `blocks`)."""
    layer_lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList) and len(child) > 0]
    if len(layer_lists) != 1:
        raise ConfigError(
            f"{type(decoder).__name__} has {len(layer_lists)} lists of layers where one is expected; "
            "layer pruning supports plain decoder-only models"
        )
    return layer_lists[0]


def output_head(model: PreTrainedModel, vocab_size: int, kept_ids: Tensor | None) -> OutputHead:
    """Return the model's head without padding rows, with its logit scale and soft cap."""
    linear = model.get_output_embeddings()
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    rows = vocab_size if kept_ids is None else int(kept_ids.numel())
    bias = getattr(linear, "bias", None)
    padded = linear.weight.shape[0] != rows
    weight = linear.weight[:rows] if padded else linear.weight
    return OutputHead(weight, bias[:rows] if bias is not None and padded else bias, scale, cap)


def fingerprint(model: PreTrainedModel) -> str:
    """Return a hash of the architecture and a thin sample of every weight, equal for float32 and bfloat16 casts.

    Reading 64 evenly spaced values a tensor takes milliseconds and still changes with any training step.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        flat = parameter.detach().reshape(-1)
        index = torch.linspace(0, flat.numel() - 1, min(64, flat.numel()), dtype=torch.float64).long()
        sample = flat[index.to(flat.device)].to(torch.bfloat16).float().cpu()
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:32]
