"""Peak memory that the chunked loss adds to a forward and backward pass without logits.

    python benchmarks/loss_memory.py [--tokens 4096]

Each side runs in a process of its own with the same hidden states and weights. The peak resident size is counted from
just before the step (Linux resets the peak on request), so loading does not hide it. The baseline's loss is a sum over
hidden states and has neither head nor logits. The head's own gradient ([V, D] float32) is part of what is added.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import torch
from common import peak_of, write_result

from distillspec.config import DraftConfig, LossConfig, TargetConfig
from distillspec.losses import DenseTeacher, LossMix, chunked_loss
from distillspec.models import LanguageModel, initialise_draft, load_target
from distillspec.types import OutputHead

LIMIT_GB = 0.25


def main() -> None:
    options = _options()
    if options.side:
        print(measure(options.side, options.tokens))
        return
    peaks = {
        side: [_in_process(side, options.tokens) for _ in range(options.repeats)] for side in ("baseline", "chunked")
    }
    median = {side: sorted(values)[len(values) // 2] for side, values in peaks.items()}
    added = (median["chunked"] - median["baseline"]) / 1e9
    write_result(
        "loss_memory",
        {
            "tokens": options.tokens,
            "peak_bytes": peaks,
            "added_gb": added,
            "limit_gb": LIMIT_GB,
            "dense_logits_gb": options.tokens * 49152 * 4 / 1e9,
            "met": added <= LIMIT_GB,
        },
    )


def measure(side: str, tokens: int) -> int:
    """Peak resident bytes of one training step over `tokens` positions of SmolLM2 with the whole vocabulary."""
    target = load_target(TargetConfig(dtype="float32"))
    draft = initialise_draft(DraftConfig(layers=4), target)
    draft.model.train()
    ids = torch.randint(0, target.identity.vocab_size, (tokens // 512, 512), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(512).expand_as(ids)
    with torch.no_grad():
        teacher = target.hidden(ids, positions).reshape(tokens, -1)
    return peak_of(lambda: _step(side, draft, teacher, target.head, ids, positions))


def _step(
    side: str, draft: LanguageModel, teacher: torch.Tensor, head: OutputHead, ids: torch.Tensor, positions: torch.Tensor
) -> None:
    hidden = draft.hidden(ids, positions).reshape(len(teacher), -1)
    if side == "baseline":
        hidden.float().square().mean().backward()
        return
    mix = LossMix.parse(LossConfig().terms)
    chunked_loss(hidden, draft.head, DenseTeacher(teacher, head), mix).loss.backward()


def _in_process(side: str, tokens: int) -> int:
    command = [sys.executable, __file__, "--side", side, "--tokens", str(tokens)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--side", choices=("baseline", "chunked"), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
