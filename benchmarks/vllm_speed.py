"""This engine's speed against vLLM's CPU build: the same prompts, number format and threads, greedy, in paired rounds.

    python benchmarks/vllm_speed.py --prompts math.jsonl --vllm ../vllm/bin/python [--draft RUN/draft]

`--vllm` is the Python of an environment with vLLM. It runs there as a server of this script and waits while the other
side runs. Sides: vLLM, this engine without speculation, and with `--draft` this engine with lengths by goodput.
The ratio is ours over vLLM's tokens a second, the median of paired rounds. `share` is that of the best rate at which
prepacked products read weights (`bandwidth.py`), at batch 1 without speculation. Writes `results/vllm_speed.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

BATCHES = (1, 8)
GOALS = {"1": 1.3, "8": 1.1}
MODEL_LEN, TOKENS = 1024, 128
MEMORY = 0.4  # of the machine, which vLLM wants free at its start
KEY = b"vllm_speed"  # the socket lies in a folder of ours


def main() -> int:
    options = _options()
    if options.worker:
        serve(json.loads(Path(options.worker).read_text()))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        result = compare(options, Path(folder))
    from common import write_result

    write_result("vllm_speed", result)
    return 0


def compare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run both sides by turns and return rates and ratios by batch size."""
    import torch
    from bandwidth import read_share
    from sides import generate, greedy, make_engine, paired, read_prompts

    from distillspec.config import TargetConfig
    from distillspec.models import load_target
    from distillspec.serving.draft_loading import load_draft

    target = load_target(TargetConfig(path=options.target, dtype=options.dtype, device="cpu"))
    prompts = read_prompts(options.prompts, target, max(BATCHES))
    target.model.save_pretrained(folder / "target")
    target.text_tokenizer.save_pretrained(folder / "target")
    dtype = str(target.dtype).removeprefix("torch.")
    work = {
        "target": str(folder / "target"),
        "dtype": dtype,
        "prompts": prompts,
        "threads": torch.get_num_threads(),
        "socket": str(folder / "socket"),
    }
    (folder / "work.json").write_text(json.dumps(work))
    options.compile = True
    engines = {"distillspec": make_engine(options, target, None, max(BATCHES), max_model_len=MODEL_LEN)}
    if options.draft:
        draft, settings = load_draft(options.draft, target), {"controller": "goodput", "speculation_length": 4}
        engines["goodput"] = make_engine(options, target, draft, max(BATCHES), max_model_len=MODEL_LEN, **settings)
    by_batch: dict[str, Any] = {}
    with Listener(work["socket"], authkey=KEY) as listener:
        process = subprocess.Popen([options.vllm, __file__, "--worker", str(folder / "work.json")])
        with listener.accept() as other:
            version = other.recv()
            for batch in BATCHES:
                sides: dict[str, Callable[[], int]] = {
                    name: (lambda engine=engine, count=batch: generate(engine, prompts[:count], greedy(TOKENS)))  # type: ignore[misc]
                    for name, engine in engines.items()
                }
                sides["vllm"] = lambda count=batch: _ask(other, count)  # type: ignore[misc]
                by_batch[str(batch)] = paired(sides, options.rounds)
            other.send(None)
        process.wait(timeout=60)
    for engine in engines.values():
        engine.close()
    plain = by_batch["1"]["sides"]["distillspec"]["tokens_per_s"]
    return {
        "vllm": version,
        "dtype": dtype,
        "threads": work["threads"],
        "tokens": TOKENS,
        "batch": by_batch,
        **read_share(target, plain),
        "goals": GOALS,
        "met": {batch: by_batch[batch]["ratio"] >= goal for batch, goal in GOALS.items()},
    }


def _ask(other: Connection, batch: int) -> int:
    other.send(batch)
    tokens: int = other.recv()
    return tokens


def serve(work: dict[str, Any]) -> None:
    """Answer the first so many prompts in vLLM as often as asked. Runs where distillspec may not be installed."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS=str(work["threads"]))
    from vllm import LLM, SamplingParams, __version__

    llm = LLM(
        model=work["target"],
        dtype=work["dtype"],
        max_model_len=MODEL_LEN,
        max_num_seqs=max(BATCHES),
        enable_prefix_caching=False,
        gpu_memory_utilization=MEMORY,
    )
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    with Client(work["socket"], authkey=KEY) as asker:
        asker.send(__version__)
        while (batch := asker.recv()) is not None:
            requests = [{"prompt_token_ids": ids} for ids in work["prompts"][:batch]]
            outputs = llm.generate(requests, params, use_tqdm=False)
            asker.send(sum(len(output.outputs[0].token_ids) for output in outputs))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts")
    parser.add_argument("--draft", help="a draft to speculate with, lengths by goodput")
    parser.add_argument("--vllm", default=sys.executable, help="Python of an environment with vLLM")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.worker and not options.prompts:
        parser.error("--prompts is needed")
    return options


if __name__ == "__main__":
    sys.exit(main())
