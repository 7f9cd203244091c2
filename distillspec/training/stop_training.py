"""Training of a `StopHead`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from distillspec.models.stop_head import StopExamples, StopHead

BATCH = 512


def train_stop(head: StopHead, examples: StopExamples, epochs: int, learning_rate: float, seed: int) -> Iterator[float]:
    """Train on cross-entropy with the acceptance as a soft label. Yield the mean loss of each epoch, in nats."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(head.parameters(), learning_rate)
    for _ in range(epochs):
        losses = []
        for rows in torch.randperm(len(examples), generator=generator).split(BATCH):
            if len(rows) < 2 <= len(examples):
                continue  # batch normalisation needs two
            loss = binary_cross_entropy_with_logits(head(examples.inputs[rows]), examples.alpha[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        yield sum(losses) / len(losses)
