"""Compare the acceptance of an exported draft in vLLM with this engine's, at temperature 0 on the same prompts.

    python benchmarks/vllm_acceptance.py --prompts math.jsonl --draft RUN/draft --vllm ../vllm/bin/python

`--vllm` is the Python of an environment with vLLM (its CPU build is enough). Without vLLM in it the script says so and
exits 2. `eagle` drafts run as EAGLE-3, `medusa` ones as Medusa, `block` ones as P-EAGLE, with the settings that the
export prints. Both sides compute in the same number format and draft fixed chains greedily. Acceptance length is one
plus the accepted tokens of a drafted chain, its mean over all chains. Texts part where two tokens are nearly equal, so
their common beginning is reported too. Exits 1 if the lengths differ by more than 5 %. Writes `KIND_FORMAT.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WITHIN = 0.05
MODEL_LEN = 1024
MEMORY = 0.4  # of the machine, which vLLM wants free at its start


def main() -> int:
    options = _options()
    if options.worker:
        work = Path(options.worker)
        answers_of(work).write_text(json.dumps(in_vllm(json.loads(work.read_text()))))
        return 0
    probe = subprocess.run([options.vllm, "-c", "import vllm"], capture_output=True, check=False)
    if probe.returncode:
        print(f"{options.vllm} has no vLLM: make an environment with it and name its Python with --vllm")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        result = compare(options, Path(folder))
    from common import write_result

    write_result(f"{result['kind']}_{result['format']}", result)
    return 0 if abs(result["ratio"] - 1) <= WITHIN else 1


def compare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Export the draft, answer the prompts on both sides, and return lengths and what the texts share."""
    from sides import read_prompts

    from distillspec.config import TargetConfig
    from distillspec.export import export_draft
    from distillspec.models import load_draft, load_target

    target = load_target(TargetConfig(path=options.target, dtype=options.dtype, device="cpu"))
    prompts = read_prompts(options.prompts, target, options.count)
    exported = export_draft(
        Path(options.draft),
        folder / "draft",
        options.format,
        target,
        dtype=options.dtype,
        speculation_length=options.length,
    )
    speculative = json.loads(shlex.split(exported.serve)[-1])  # what a user is told to give vLLM
    options.length = speculative["num_speculative_tokens"]  # vLLM asks all of Medusa's heads
    target.model.save_pretrained(folder / "target")
    target.text_tokenizer.save_pretrained(folder / "target")
    draft = load_draft(Path(options.draft), target, dtype=target.dtype)
    ours = in_distillspec(options, target, draft, prompts)
    work = {
        "target": str(folder / "target"),
        "speculative": speculative,
        "dtype": options.dtype,
        "tokens": options.tokens,
        "prompts": prompts,
    }
    (folder / "work.json").write_text(json.dumps(work))
    theirs = _in_other_python(options.vllm, folder / "work.json")
    return {
        "target": options.target,
        "kind": draft.kind,
        "format": options.format,
        "dtype": options.dtype,
        "prompts": len(prompts),
        "tokens": options.tokens,
        "drafted_tokens": options.length,
        "export": {"max_abs_error": exported.max_abs_error, "notes": exported.notes},
        "distillspec": ours["counts"],
        "vllm": theirs["counts"],
        "ratio": theirs["counts"]["acceptance_length"] / ours["counts"]["acceptance_length"],
        "common_share_of_text": common_share(ours["texts"], theirs["texts"]),
    }


def in_distillspec(
    options: argparse.Namespace, target: Any, draft: Any, prompts: Sequence[list[int]]
) -> dict[str, Any]:
    """Answer the prompts here and return texts and counts."""
    from sides import greedy, make_engine

    options.compile = False
    engine = make_engine(options, target, draft, 4, max_model_len=MODEL_LEN, speculation_length=options.length)
    outputs = engine.generate(list(prompts), greedy(options.tokens))
    engine.close()
    stats = [output.stats for output in outputs]
    chains = sum(answer_stats.tried_per_position[0] for answer_stats in stats if answer_stats.tried_per_position)
    return {
        "texts": [list(output.token_ids) for output in outputs],
        "counts": counts(chains, sum(answer_stats.accepted for answer_stats in stats)),
    }


def in_vllm(work: dict[str, Any]) -> dict[str, Any]:
    """Answer the prompts in vLLM and return texts and counts. Runs where distillspec may not be installed."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    from vllm import LLM, SamplingParams, __version__

    llm = LLM(
        model=work["target"],
        dtype=work["dtype"],
        max_model_len=MODEL_LEN,
        max_num_seqs=4,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        gpu_memory_utilization=MEMORY,
        speculative_config=work["speculative"],
    )
    params = SamplingParams(temperature=0.0, max_tokens=work["tokens"], ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in work["prompts"]], params, use_tqdm=False)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    chains, accepted = (metrics[f"vllm:spec_decode_num_{name}"].value for name in ("drafts", "accepted_tokens"))
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    return {"texts": texts, "counts": {**counts(chains, accepted), "version": __version__}}


def counts(chains: int, accepted: int) -> dict[str, Any]:
    """Return the counts with the mean length that a step emits."""
    return {"chains": chains, "accepted": accepted, "acceptance_length": 1 + accepted / max(chains, 1)}


def common_share(ours: Sequence[list[int]], theirs: Sequence[list[int]]) -> float:
    """Return the share of tokens before the first one at which two texts differ."""
    common = 0
    for text, other in zip(ours, theirs, strict=True):
        differ = [index for index, pair in enumerate(zip(text, other, strict=False)) if pair[0] != pair[1]]
        common += differ[0] if differ else min(len(text), len(other))
    return common / sum(map(len, ours))


def answers_of(work: Path) -> Path:
    """Return the file that the other environment's results go to."""
    return work.with_suffix(".answers.json")


def _in_other_python(python: str, work: Path) -> dict[str, Any]:
    """Run this file in the environment with vLLM."""
    subprocess.run([python, __file__, "--worker", str(work)], check=True)
    answers: dict[str, Any] = json.loads(answers_of(work).read_text())
    return answers


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts")
    parser.add_argument("--draft", help="a draft of kind eagle, medusa or block")
    parser.add_argument("--vllm", default=sys.executable, help="Python of an environment with vLLM")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--format", default="vllm", choices=("vllm", "speculators"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--length", type=int, default=3, help="drafted tokens a step")
    parser.add_argument("--count", type=int, default=16, help="prompts")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.worker and not (options.prompts and options.draft):
        parser.error("--prompts and --draft are needed")
    return options


if __name__ == "__main__":
    sys.exit(main())
