"""One optimizer step of TRL's GKD trainer (forward KL, fixed data, live teacher) on the benchmark's samples."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from trl.experimental.gkd import GKDConfig, GKDTrainer

from distillspec.models import LanguageModel
from distillspec.types import Sample


def trl_step(
    draft: PreTrainedModel, target: LanguageModel, samples: list[Sample], rows: int, length: int
) -> Callable[[], int]:
    """Return a function that takes the next step and returns its response tokens. Batches equal our side's."""
    trainer = _trainer(draft, target, rows)
    trainer.create_optimizer()
    taken = 0

    def step() -> int:
        nonlocal taken
        batch = _batch([samples[(taken + i) % len(samples)] for i in range(rows)], length, target)
        taken += rows
        tokens = (batch["labels"][:, 1:] != -100).sum()
        trainer.training_step(trainer.model, batch, num_items_in_batch=tokens)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=True)
        return int(tokens)

    return step


def _trainer(draft: PreTrainedModel, target: LanguageModel, rows: int) -> GKDTrainer:
    draft.train()
    config = GKDConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=rows,
        lmbda=0.0,  # fixed data
        beta=0.0,  # forward KL
        temperature=1.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        optim="adamw_torch_fused",
    )
    dummy = Dataset.from_list([{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}])
    return GKDTrainer(
        model=draft,
        teacher_model=target.model,
        args=config,
        train_dataset=dummy,
        processing_class=target.tokenizer,
    )


def _batch(samples: list[Sample], length: int, target: LanguageModel) -> dict[str, Any]:
    ids, labels = [], []
    for sample in samples:
        tokens = torch.tensor((sample.prompt_ids + sample.response_ids)[:length])
        label = tokens.clone()
        label[: len(sample.prompt_ids)] = -100
        ids.append(tokens)
        labels.append(label)
    pad = target.tokenizer.eos_token_id
    prompts = [torch.tensor(sample.prompt_ids) for sample in samples]
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        "prompts": pad_sequence(prompts, batch_first=True, padding_value=pad),
    }
