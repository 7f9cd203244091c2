"""Small network that tells, before a draft's token is drawn, how probable it is that the target accepts it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

WEIGHTS = "stop.weights"  # no .safetensors: other engines load every such file of a folder as the draft's weights
BEST = 8  # probabilities that are read


class StopHead(nn.Module):
    """Predicts Σ min(p, q) from the draft alone (decision models of multi-candidate decoding, §3.3).

    It sees nothing that was drawn, so it may decide what is drafted behind a token (`engine.draft_confidence`), and
    verification stays exact. Its weights are float32.

    Args:
        reads: `probs`: the `BEST` largest probabilities of q and its entropy, through two layers. `state`: the state
            that the draft's head reads, through three.
        size: numbers of a state.
        width: of the hidden layers.
        columns: of the draft's head.
    """

    def __init__(self, reads: str, size: int, width: int, columns: int) -> None:
        super().__init__()
        self.reads = reads
        self.size = size
        self.width = width
        self.columns = columns
        count = size if reads == "state" else min(BEST, columns) + 1
        self.norm = nn.BatchNorm1d(count, affine=False, momentum=None)  # mean and spread of what trained it
        between = [nn.Linear(width, width), nn.SiLU()] if reads == "state" else []
        self.layers = nn.Sequential(nn.Linear(count, width), nn.SiLU(), *between, nn.Linear(width, 1))

    @property
    def record(self) -> dict[str, Any]:
        """Kind and sizes, for `distillspec.json`."""
        return {"reads": self.reads, "size": self.size, "width": self.width, "columns": self.columns}

    def inputs(self, states: Tensor, logits: Tensor) -> Tensor:
        """Return what it reads `[n, F]` float32.

        Args:
            states: `[n, size]` of any float dtype, as the draft's head reads them.
            logits: `[n, columns]` raw, of any float dtype.
        """
        if self.reads == "state":
            return states.float()
        probs = torch.softmax(logits.float(), -1)
        entropy = torch.special.entr(probs).sum(-1, keepdim=True)
        return torch.cat([probs.topk(min(BEST, self.columns), -1).values, entropy], -1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logit of the acceptance of each row of `inputs [n, F]`, `[n]` float32."""
        logits: Tensor = self.layers(self.norm(inputs))[:, 0]
        return logits

    @torch.no_grad()
    def acceptance(self, states: Tensor, logits: Tensor) -> Tensor:
        """Return the predicted acceptance `[n]` float32 in [0, 1]. For the arguments see `inputs`."""
        return torch.sigmoid(self(self.inputs(states, logits)))


@dataclass(frozen=True)
class StopExamples:
    """Positions at which a draft chose a token.

    inputs: `[n, F]` float32, what the head reads.
    best: `[n]` float32, the draft's best probability there.
    alpha: `[n]` float32, Σ min(p, q): the probability that its token is accepted.
    """

    inputs: Tensor
    best: Tensor
    alpha: Tensor

    def __len__(self) -> int:
        return len(self.alpha)


def write_stop_head(head: StopHead, folder: Path) -> None:
    """Write the weights into a draft's folder."""
    (folder / WEIGHTS).write_bytes(save({name: value.cpu().contiguous() for name, value in head.state_dict().items()}))


def read_stop_head(folder: Path, record: dict[str, Any] | None, device: torch.device) -> StopHead | None:
    """Return the network that a draft's folder records, None for none."""
    if record is None:
        return None
    head = StopHead(**record)
    head.load_state_dict(load((folder / WEIGHTS).read_bytes()))
    return head.to(device).eval().requires_grad_(False)
