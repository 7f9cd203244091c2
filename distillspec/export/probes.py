"""Text on which an export is fitted and proved: a few fixed prompts, continued by the draft itself."""

from __future__ import annotations

import torch
from torch import Tensor

from distillspec.errors import RunError
from distillspec.models import LanguageModel

PROMPTS = (
    "Explain why the sky is blue to a ten-year-old.",
    "A train leaves at 9:40 and travels 210 km at 84 km/h. When does it arrive?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Summarise the causes of the First World War in three sentences.",
    "Translate into French: The library closes at six on Sundays.",
    "List five vegetables that grow well in the shade.",
    "What is the derivative of x**3 * sin(x)?",
    "Write a short, polite e-mail asking for a refund.",
)
SURPRISES = 0.1  # share of continuation tokens drawn from the whole vocabulary
BEGINNINGS = 64  # the first position is the least like the others
HELD_OUT = 2  # the last prompts test the fit on the others


@torch.no_grad()
def probe_sequences(draft: LanguageModel, *, samples: int = 8, new_tokens: int = 32, seed: int = 0) -> list[Tensor]:
    """Return batches `[B, L]` int64 of absolute ids: random starts, then a prompt each, all continued by the draft.

    A served draft mostly reads its own proposals, so its own samples give the hidden states that matter. Now
    and then it reads a token of the target's that it would never propose, so some are drawn from all ids.
    """
    generator = torch.Generator().manual_seed(seed)
    beginnings = torch.randint(draft.identity.vocab_size, (BEGINNINGS, 1), generator=generator)
    prompts = _prompts(draft)
    return [
        _continued(draft, beginnings, new_tokens // 4, generator),
        *(_continued(draft, torch.tensor([ids] * samples), new_tokens, generator) for ids in prompts),
    ]


@torch.no_grad()
def held_out_sequences(model: LanguageModel, *, samples: int = 4, new_tokens: int = 32, seed: int = 0) -> list[Tensor]:
    """Return batches `[B, L]` int64 of the held-out prompts, continued by `model`."""
    generator = torch.Generator().manual_seed(seed)
    prompts = _prompts(model)[-HELD_OUT:]
    return [_continued(model, torch.tensor([ids] * samples), new_tokens, generator) for ids in prompts]


def _prompts(model: LanguageModel) -> list[list[int]]:
    return [_prompt_ids(model, text, chat=i % 2 == 0) for i, text in enumerate(PROMPTS)]


def _prompt_ids(draft: LanguageModel, text: str, *, chat: bool) -> list[int]:
    tokenizer = draft.text_tokenizer
    if chat and tokenizer.chat_template:
        message = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokenizer(text)["input_ids"]


def _continued(draft: LanguageModel, ids: Tensor, new_tokens: int, generator: torch.Generator) -> Tensor:
    ids = ids.to(draft.device)
    sequence, cache = [ids], None
    for _ in range(new_tokens):
        output = draft.model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits = output.logits[:, -1, : draft.width].float().cpu()
        if not torch.isfinite(logits).all():
            raise RunError(f"{draft.name} gives logits that are not finite; nothing was exported")
        columns = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        anything = torch.randint(draft.identity.vocab_size, columns.shape, generator=generator)
        surprised = torch.rand(columns.shape, generator=generator) < SURPRISES
        ids = torch.where(surprised, anything, draft.absolute_ids(columns)).to(draft.device)
        sequence.append(ids)
    return torch.cat(sequence, dim=1)
