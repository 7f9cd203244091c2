"""Output of the engine on an accelerator against plain passes, for every way of drafting.

    python benchmarks/gpu_exact.py [--device cuda] [--requests 48]

A small Llama of random float32 weights, and drafts that are the same with noise, so that some tokens are accepted. More
requests than slots, ragged prompts, every third one more urgent than those before it. Ways are no draft, chains, trees,
two micro-batches (drafts on a stream of their own), and compiled passes. TF32 is off.

greedy   tokens against those of whole passes in float64 on the CPU. Excused is what follows a place where their two
         best logits are closer than float32 can tell (1e-4)
seeded   tokens at temperature .8 against those of the engine without a draft

Writes `results/gpu_exact.json`.
"""

from __future__ import annotations

import argparse
import copy
import random
from typing import Any

import torch
from common import write_result
from gpu_models import SHAPES, random_model

from distillspec.models import LanguageModel
from distillspec.serving import Engine, EngineSettings, Request, RequestOutput, SamplingParams

TIE, NOISE, TOKENS, SLOTS = 1e-4, 4e-3, 24, 5
WAYS: dict[str, dict[str, Any]] = {
    "no draft": {},
    "chain": {"tree": "off"},
    "sampled tree": {"tree": "sampled", "widths": [2, 2]},
    "topk tree": {"tree": "topk", "widths": [3, 2]},
    "dynamic tree": {"tree": "dynamic", "nodes": 8},
    "two micro-batches": {"tree": "off", "micro_batches": 2},
    "without graphs": {"tree": "off", "cuda_graphs": False},
    "compiled": {"tree": "off", "compile": True},
}


def main() -> None:
    options = _options()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    device = torch.device(options.device)
    target = random_model("tiny", device, dtype=torch.float32, tied=False)
    draft = _noisy(target)
    chance = random.Random(0)
    vocabulary = SHAPES["tiny"][-1]
    prompts = [[chance.randrange(vocabulary) for _ in range(chance.randrange(3, 90))] for _ in range(options.requests)]
    expected = _plain_greedy(target, prompts)
    by_way: dict[str, Any] = {}
    seeded: list[list[int]] = []
    for way, settings in WAYS.items():
        draft_of_way = None if way == "no draft" else draft
        greedy, accepted = _answers(target, draft_of_way, settings, prompts, temperature=0.0)
        drawn, _ = _answers(target, draft_of_way, settings, prompts, temperature=0.8)
        seeded = seeded or drawn
        by_way[way] = {
            "greedy_wrong": sum([not _is_excused(*pair) for pair in zip(greedy, expected, strict=True)]),
            "seeded_differ": sum([answer != other for answer, other in zip(drawn, seeded, strict=True)]),
            "accepted": accepted,
        }
        print(way, by_way[way], flush=True)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    exact = all(counts["greedy_wrong"] == counts["seeded_differ"] == 0 for counts in by_way.values())
    result = {"device": name, "requests": len(prompts), "tokens": TOKENS, "ways": by_way, "met": exact}
    if options.output:
        write_result(options.output, result)


def _noisy(target: LanguageModel) -> LanguageModel:
    """Return the target with noise on its weights."""
    model = copy.deepcopy(target.model)
    for weight in model.parameters():
        weight += NOISE * torch.randn_like(weight)
    return LanguageModel(model, target.tokenizer, target.identity, "noisy target")


def _answers(
    target: LanguageModel,
    draft: LanguageModel | None,
    settings: dict[str, Any],
    prompts: list[list[int]],
    temperature: float,
) -> tuple[list[list[int]], int]:
    """Return the answers by prompt, and the number of accepted tokens."""
    limits = {"max_slots": SLOTS, "max_model_len": 256, "prefill_chunk": 64, "compile": False, "controller": "fixed"}
    engine = Engine(target, draft, EngineSettings(**{**limits, "speculation_length": 3, **settings}))
    done: dict[str, RequestOutput] = {}
    try:
        for number, prompt in enumerate(prompts):
            params = SamplingParams(temperature=temperature, max_tokens=TOKENS, seed=number, ignore_eos=True)
            engine.submit(Request(str(number), tuple(prompt), params, priority=-number if number % 3 == 0 else 0))
            done |= {output.request_id: output for output in engine.step().finished}
        while engine.has_work:
            done |= {output.request_id: output for output in engine.step().finished}
    finally:
        engine.close()
    outputs = [done[str(number)] for number in range(len(prompts))]
    return [list(output.token_ids) for output in outputs], sum([output.stats.accepted for output in outputs])


@torch.inference_mode()
def _plain_greedy(target: LanguageModel, prompts: list[list[int]]) -> list[list[tuple[int, bool]]]:
    """Return for each prompt its greedy tokens by whole float64 passes, and True where the choice is a tie."""
    model = copy.deepcopy(target.model).to("cpu", torch.float64)
    answers = []
    for prompt in prompts:
        text, answer = list(prompt), list[tuple[int, bool]]()
        for _ in range(TOKENS):
            best, ids = model(torch.tensor([text])).logits[0, -1].topk(2)
            answer.append((int(ids[0]), float(best[0] - best[1]) < TIE))
            text.append(int(ids[0]))
        answers.append(answer)
    return answers


def _is_excused(answer: list[int], expected: list[tuple[int, bool]]) -> bool:
    """Return True if an answer is the expected one, up to the first tie that it decides otherwise."""
    for token, (expected_id, tie) in zip(answer, expected, strict=True):
        if token != expected_id:
            return tie
    return True


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--output", default="gpu_exact", help="name of the file under results/; empty: none")
    return parser.parse_args()


if __name__ == "__main__":
    main()
