"""Measure how many requests a cache of a given size holds at once, and what of its memory is wasted.

    python benchmarks/memory.py --gib 0.5

Prompts of real lengths are read until no more fit: alone, with a draft that reads them too, behind a common prefix, and
with several answers each. The memory in use is what the system says (smaps), beside what blocks of 16 tokens would take
by arithmetic, which hold common text once, and slots of the longest length. `waste` is memory that holds no text, and
`copies` the share that holds text which another slot holds too. A second wave of requests follows, whose prompts
overwrite the texts that the first one left.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import write_result

from distillspec.config import DraftConfig, TargetConfig
from distillspec.models import LanguageModel, initialise_draft, load_target
from distillspec.models.memory import slot_bytes, token_bytes
from distillspec.models.slot_cache import SlotCache
from distillspec.serving import Engine, EngineSettings, Request, SamplingParams
from distillspec.serving.base.catch_up import READ_WITH_DRAFTING
from distillspec.serving.proposers.base import caches_of
from distillspec.serving.proposers.draft_model import DraftModel

BLOCK = 16
MOST_ROWS = 256
ANSWER = 64  # tokens: enough that none is done before the last prompt is read
CHUNK = 4096
DRAFTED = 2  # tokens a row and step, where there is a draft


@dataclass(frozen=True)
class Load:
    """Requests of so many tokens each, half of the answer included.

    shared: leading tokens that all prompts have in common.
    answers: of each request.
    drafted: a draft reads the texts too.
    """

    lengths: Sequence[int]
    shared: int = 0
    answers: int = 1
    drafted: bool = False

    def sizes(self, block: int) -> Iterator[int]:
        """Yield the tokens that blocks of so many hold for each request. Full blocks of common text are held once."""
        for number, length in enumerate(self.lengths):
            read = (length - ANSWER // 2) // block * block
            unshared = -(-(length - read) // block) * block
            yield read + self.answers * unshared - (self.shared // block * block if number else 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--max-len", type=int, default=4096)
    parser.add_argument("--draft-layers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    target = load_target(TargetConfig(path=options.target, dtype=options.dtype, device="cpu"))
    draft = initialise_draft(DraftConfig(layers=options.draft_layers), target)
    chance = random.Random(options.seed)
    chats = [300] * MOST_ROWS
    loads = {
        "chats of 300 tokens": Load(chats),
        "50 to 2,000 tokens": Load([chance.randint(50, 2000) for _ in range(MOST_ROWS)]),
        "chats of 300 tokens, with a draft": Load(chats, drafted=True),
        "chats of 300 tokens, 200 in common": Load(chats, shared=200),
        "chats of 300 tokens, 4 answers each": Load(chats, answers=4),
    }
    result = {
        "target": options.target,
        "dtype": options.dtype,
        "budget_gib": options.gib,
        "max_model_len": options.max_len,
        "draft_layers": options.draft_layers,
        "token_bytes": token_bytes([target]),
        "token_bytes_with_draft": token_bytes([target, draft]),
        "loads": {name: fill(target, draft if load.drafted else None, load, options) for name, load in loads.items()},
    }
    write_result("memory", result, options.seed)
    return 0


def fill(target: LanguageModel, draft: LanguageModel | None, load: Load, options: argparse.Namespace) -> dict[str, Any]:
    """Fill an engine with a load's requests, in order. Return the figures of its memory."""
    budget = options.gib * 2**30
    models = [target] if draft is None else [target, draft]
    settings = EngineSettings(
        max_slots=MOST_ROWS,
        max_model_len=options.max_len,
        cache_gib=options.gib,
        prefill_chunk=CHUNK,
        speculation_length=DRAFTED if load.drafted else 0,
        controller="fixed",
        proposer="draft_model" if load.drafted else "none",
        compile=False,
    )
    engine = Engine(target, draft, settings)
    chance = random.Random(options.seed)
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True, n=load.answers)
    waves = []
    for wave in range(2):
        common = _words(chance, load.shared, target)
        for number, length in enumerate(load.lengths):
            prompt = (*common, *_words(chance, length - ANSWER // 2 - load.shared, target))
            engine.submit(Request(f"{wave}/{number}", prompt, params))
        waves.append(filled(engine, load.shared))
        for number in range(len(load.lengths)):
            engine.abort(f"{wave}/{number}")
        engine.step()
    engine.close()
    room = budget / token_bytes(models)
    return {
        "waves": waves,
        "waste": max(wave["waste"] for wave in waves),
        "within_budget": all(wave["resident_bytes"] <= budget for wave in waves),
        "requests": min(wave["requests"] for wave in waves),
        "requests_of_blocks_of_16": fitting(load.sizes(BLOCK), room),
        "requests_without_waste": fitting(load.sizes(1), room),
        "requests_of_whole_slots": int(budget // (load.answers * slot_bytes(models, options.max_len))),
    }


def _words(chance: random.Random, count: int, target: LanguageModel) -> tuple[int, ...]:
    return tuple(chance.randrange(target.identity.vocab_size) for _ in range(count))


def filled(engine: Engine, shared: int) -> dict[str, Any]:
    """Step until no more requests are admitted and all texts are read. Return the figures of the memory then."""
    before = -1
    while True:
        engine.step()
        rows = engine.sequences.decoding
        if len(rows) == len(engine.sequences.running) == before and _unread(engine) <= READ_WITH_DRAFTING:
            break
        before = len(engine.sequences.running)
    tokens = sum(row.computed for row in rows)
    used_bytes = tokens * token_bytes([engine.target])
    if isinstance(engine.proposer, DraftModel):
        used_bytes += sum(engine.proposer.state(row.id).computed for row in rows) * token_bytes(
            [engine.proposer.runner.model]
        )
    # What blocks hold once: the prefix of all, and the prompt of each request.
    prompts = {row.request.id: row.prompt_length for row in rows}
    copied = sum(row.prompt_length for row in rows) - sum(prompts.values()) + shared * (len(prompts) - 1)
    bytes_a_token = token_bytes([engine.target, *engine.drafts.values()])
    resident_bytes = resident([engine.runner.cache, *caches_of(engine.proposer)])
    free_text_tokens = sum(map(len, engine.sequences.pool.contents)) - tokens
    return {
        "requests": len(prompts),
        "tokens": tokens,
        "tokens_of_free_texts": free_text_tokens,
        "used_bytes": used_bytes,
        "resident_bytes": resident_bytes,
        "waste": 1 - (used_bytes + free_text_tokens * bytes_a_token) / resident_bytes,
        "copies": copied * bytes_a_token / resident_bytes,
    }


def _unread(engine: Engine) -> int:
    """Return the most tokens of a running sequence that the draft has not read."""
    draft = engine.proposer
    if not isinstance(draft, DraftModel):
        return 0
    return max((len(row.tokens) - draft.state(row.id).computed for row in engine.sequences.decoding), default=0)


def fitting(sizes: Iterator[int], room: float) -> int:
    """Return how many requests, in order, take at most `room` tokens."""
    count = 0
    for size in sizes:
        room -= size
        if room < 0:
            break
        count += 1
    return count


def resident(caches: Sequence[SlotCache]) -> int:
    """Return the bytes of caches' tensors that are in memory, by /proc/self/smaps. Tensors may share a mapping."""
    starts = [tensor.data_ptr() for cache in caches for tensor in cache.tensors()]
    total = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = line.split(" ")[0].split("-")
        if len(bounds) == 2:
            inside = any(int(bounds[0], 16) <= start < int(bounds[1], 16) for start in starts)
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


if __name__ == "__main__":
    sys.exit(main())
