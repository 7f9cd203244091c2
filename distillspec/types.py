"""Messages that cross module borders, the Protocols of interchangeable parts, and types of arrays.

Shapes: N = loss positions, T = tokens, V = vocabulary. Log-probabilities are natural (nats), float32 unless said
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from distillspec.signals import Signal, SignalRequest

Floats = NDArray[numpy.float64]
Ints = NDArray[numpy.int64]
Bools = NDArray[numpy.bool_]


@dataclass(frozen=True)
class SamplingPolicy:
    """Rules by which tokens are drawn from logits: the *deployed policy* under which acceptance is measured.

    `temperature=0` is greedy. `top_k=0`, `top_p=1` and `min_p=0` switch those filters off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def is_plain(self) -> bool:
        """True when the policy is the softmax at its temperature, with no filter."""
        return not self.is_greedy and self.top_k == 0 and self.top_p >= 1.0 and self.min_p <= 0.0


@dataclass(frozen=True)
class Prompt:
    """One request as the target reads it: `token_ids` already carry the chat template."""

    id: str
    token_ids: tuple[int, ...]
    domain: str = "default"
    response: str | None = None


@dataclass(frozen=True)
class RecordedStates:
    """The target's hidden states `ids` of all tokens of a text but its last, which no draft reads the state of."""

    ids: tuple[int, ...]
    values: Tensor  # [L − 1, len(ids) · D] side by side in the order of `ids`: bfloat16, or float8_e4m3fn with scales
    scales: Tensor | None = None  # [L − 1, len(ids)] float32: a state is its values times its scale

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def of(self, ids: Sequence[int]) -> Tensor | None:
        """Return the states `ids` `[L − 1, len(ids) · D]` in bfloat16, or None if one of them is missing."""
        if not set(ids) <= set(self.ids):
            return None
        places = [self.ids.index(state) for state in ids]
        parts = self.values.unflatten(1, (len(self.ids), -1))
        if places != list(range(len(self.ids))):
            parts = parts[:, places]
        if self.scales is not None:
            parts = parts.float() * self.scales[:, places, None]
        return parts.flatten(1).to(torch.bfloat16)


@dataclass(frozen=True)
class StateRequest:
    """Hidden states of the target to record, none by default, and the precision to keep them in."""

    ids: tuple[int, ...] = ()
    precision: str = "bf16"  # bf16 | fp8

    def bytes_per_token(self, width: int) -> int:
        """Return the bytes that the states of one token take, given their width D."""
        return len(self.ids) * (2 * width if self.precision == "bf16" else width + torch.float32.itemsize)

    def record(self, values: Tensor) -> RecordedStates:
        """Return states `[L − 1, len(ids) · D]` of any dtype as they are kept, on the CPU.

        In fp8 each state of a token has a scale of its own: some states are a thousand times as large as others.
        """
        if self.precision == "bf16":
            return RecordedStates(self.ids, values.to("cpu", torch.bfloat16, copy=True))
        parts = values.float().unflatten(1, (len(self.ids), -1))
        scales = parts.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny) / torch.finfo(torch.float8_e4m3fn).max
        kept = (parts / scales[..., None]).to(torch.float8_e4m3fn)
        return RecordedStates(self.ids, kept.flatten(1).cpu(), scales.cpu())


NO_STATES = StateRequest()


@dataclass(frozen=True)
class Sample:
    """A prompt with one response, and the teacher's signal at every response token if it is known."""

    prompt_id: str
    domain: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    signal: Signal | None = None
    source: str = "fixed"  # fixed | teacher | draft: which model wrote the response
    finished: bool = True  # False when cut at the length limit
    writer_logprobs: Tensor | None = None  # [T] float32, nats: of each token under the policy it was drawn with
    states: RecordedStates | None = None

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class TokenBatch:
    """Several samples packed into rows, block-diagonal: `position_ids` restart at 0 for each sample.

    Loss positions are the places whose *next* token is a response token. The last prompt token is the first of them.
    `loss_index` points into the flattened [B * L] grid.
    """

    input_ids: Tensor  # [B, L] int64
    position_ids: Tensor  # [B, L] int64
    loss_index: Tensor  # [N] int64
    labels: Tensor  # [N] int64, the next token (absolute vocabulary ids)
    sample_index: Tensor  # [N] int64, which of `domains` each position belongs to
    domains: tuple[str, ...]
    from_draft: Tensor  # [N] bool, the label was sampled from the draft
    signal: Signal | None = None
    writer_logprobs: Tensor | None = None  # [N] float32, of the labels when they were drawn, NaN where unknown
    states: Tensor | None = None  # [B, L, F] the target's states that the draft reads

    @property
    def response_tokens(self) -> int:
        return int(self.loss_index.numel())

    def at(self, rows: Tensor) -> TokenBatch:
        """Return the batch with some of its loss positions, `rows [n]` int64, and without a signal."""
        names = ("loss_index", "labels", "sample_index", "from_draft")
        written = None if self.writer_logprobs is None else self.writer_logprobs[rows]
        some = {name: getattr(self, name)[rows] for name in names}
        return replace(self, signal=None, writer_logprobs=written, **some)

    def to(self, device: torch.device | str) -> TokenBatch:
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("input_ids", "position_ids", "loss_index", "labels", "sample_index", "from_draft")
        }
        signal = None if self.signal is None else self.signal.to(device)
        written = None if self.writer_logprobs is None else self.writer_logprobs.to(device)
        states = None if self.states is None else self.states.to(device, non_blocking=True)
        return TokenBatch(domains=self.domains, signal=signal, writer_logprobs=written, states=states, **moved)


@dataclass(frozen=True)
class GenerationRequest:
    """One sequence to write. The same `seed` and prompt give the same tokens in any batch (float32)."""

    prompt: Prompt
    max_new_tokens: int
    seed: int


@dataclass(frozen=True)
class OutputHead:
    """Map from final hidden states to logits, kept apart so that losses can apply it chunk by chunk."""

    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0  # logits are multiplied by this (granite, cohere)
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap) (gemma2)

    def logits(self, hidden: Tensor, linear: Callable[..., Tensor] = torch.nn.functional.linear) -> Tensor:
        """Return logits `[..., V]` in the weight's dtype, given `hidden [..., D]`. `linear` may be a faster product."""
        logits = linear(hidden, self.weight, self.bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


class Generator(Protocol):
    """Writer of responses with a model. `distillspec.generation` has the Hugging Face one, `serving` the engine's."""

    source: str  # what its samples are marked with: teacher | draft | mixed

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        policy: SamplingPolicy,
        *,
        stop_ids: Sequence[int],
        signal: SignalRequest | None = None,
        on_tokens: Callable[[int], None] | None = None,
        deadline: float | None = None,
    ) -> Iterator[tuple[int, Sample]]:
        """Yield `(index into requests, sample)` as sequences finish, in any order.

        The stop token that ended a response is part of it.

        Args:
            signal: records the generating model's own distribution at every response token.
            on_tokens: called with the number of tokens each step added.
            deadline: seconds of `time.monotonic`. From then on unfinished sequences are yielded as they are, and
                requests not started are dropped.
        """
        ...


@dataclass(frozen=True)
class ModelIdentity:
    """Identity of a model. Draft and target must agree in tokenizer and vocabulary to speculate together."""

    tokenizer_hash: str
    vocab_size: int  # ids the tokenizer can produce (the model may pad beyond it)
    weights_hash: str = ""

    @property
    def version(self) -> str:
        """Return the short hash of the weights: a draft's name while it is served."""
        return short_hash(self.weights_hash)


def short_hash(weights_hash: str) -> str:
    """Return the first 12 hexadecimal digits, enough to distinguish the versions of a draft."""
    return weights_hash[:12]


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % bootstrap interval over prompts."""

    mean: float
    low: float
    high: float
