"""Figures of docs/figures.md, README.md and docs/serving.md are those of the results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from .pages import ROOT, page

RESULTS = ROOT / "benchmarks" / "results"
PAGE = page("docs/figures.md")
FIGURES = [row for row in PAGE.rows if row[-1].endswith(".json`")]
BY_BATCH = [row for row in PAGE.rows if re.search(r"`trees\w*\.json`\)$", row[0])]
BATCHES = ("1", "2", "4", "8", "16")  # columns of the second table


def figures() -> dict[str, list[str]]:
    """Return the page's figures as the results have them, by the first words of their row."""
    exact, plain, spec = _result("exactness"), _result("engine_plain"), _result("engine_speculation")
    server, data = _result("server_overhead")["tokens_per_s_ratio"], _result("data_source")["ratios"]
    lookup, lengths = spec["batch"]["lookup"], _result("best_length")["batch"]
    best = {key: own["times_plain"][str(own["best_length"])]["median"] for key, own in lengths.items()}
    goodput = {key: own["goodput_over_best"] for key, own in lengths.items()}
    trees = {key: own["trees_over_goodput_chains"] for key, own in _maths("trees").items()}
    served = _result("served_acceptance_eagle")["all"]
    vllm = {batch: found["ratios"] for batch, found in _result("vllm_speed")["batch"].items()}
    again = _result("suffix_one")["files"]["sql"]["second"]["ngram_and_draft"]
    outputs = f"{exact['identical']} of {exact['outputs']} outputs, {exact['combinations']} combinations"
    ratios = [f"{plain['batch'][key]['ratio']:.2f} at batch {key}" for key in ("1", "8")]
    ragged = _result("engine_ragged")["batch"]["32"]["ratio"]
    share, best_rate, read_mb = (plain["bandwidth"][key] for key in ("share", "best_gb_per_s", "read_mb_a_step"))
    return {
        "greedy output identical": [outputs],
        "engine without speculation, times transformers": ratios,
        "the same for 32 prompts": [f"{ragged:.2f}"],
        "engine without speculation, times vLLM": [f"{shown(vllm[k]['distillspec'])} at batch {k}" for k in ("1", "8")],
        "plain decoding at batch 1": [f"{share:.2f} of {best_rate:.1f} GB/s", f"{read_mb:.0f} MB a step"],
        "engine with a draft": [f"{shown(vllm[k]['goodput'])} at batch {k}" for k in ("1", "8")],
        "best fixed length": [f"{shown(best[key])} at batch {key}" for key in ("1", "8")],
        "lengths by goodput": [f"{_with_interval(goodput[key])} at batch {key}" for key in ("1", "8")],
        "trees by goodput": [f"{_with_interval(trees[key])} at batch {key}" for key in ("1", "8")],
        "n-grams of earlier answers": [_over_draft("proposers_eagle_ends")],
        "the same at T = 1": [_over_draft("proposers_eagle")],
        "the same on chat": [_over_draft("proposers_eagle_chat")],
        "the same on SQL": [_over_draft("proposers_eagle_sql")],
        "n-grams beside a draft on SQL": [_with_interval(again)],
        "default proposers, shapes": _by_default("engine_speculation"),
        "those at T = 1": _by_default("engine_speculation_t1"),
        "prompt lookup": [
            f"{lookup['ratio']:.2f} with {lookup['best_length']} tokens",
            f"{lookup['goodput']:.2f} by goodput",
        ],
        "server": [f"{server['median']:.2f} [{server['low']:.2f}, {server['high']:.2f}]"],
        "tokens accepted": [f"{served['served']:.3f} and {served['evaluated']:.3f} of {served['trials']:,}"],
        "exported draft": [_in_vllm("eagle")],
        "the same of a `block` draft": [_in_vllm("block")],
        "the same of Medusa's heads": [_in_vllm("medusa")],
        "sampling training data": [f"{data[name]:.2f} by `{name}`" for name in ("slots", "engine")],
    }


def _maths(name: str) -> dict[str, Any]:
    """Return what a result of trees says of maths, by batch. Old ones have nothing else."""
    found: dict[str, Any] = _result(name)
    by_batch: dict[str, Any] = found.get("batch") or found["files"]["math"]
    return by_batch


def _by_default(name: str) -> list[str]:
    """Return what an engine with default settings writes over no speculation."""
    found = _result(name)["batch"]
    return [f"{shown(found[key]['ratios']['default'])} at batch {key}" for key in ("1", "8")]


def _with_interval(ratio: dict[str, float]) -> str:
    return f"{shown(ratio['mean'])} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def _in_vllm(kind: str) -> str:
    """Return the accepted length of an exported draft in vLLM over ours."""
    return f"{_result(f'{kind}_vllm')['ratio']:.3f}"


def _over_draft(name: str) -> str:
    """Return what n-grams beside the draft write over the draft alone, at batch 1."""
    found = _result(name)["batches"]["1"]["over_draft"]["ngram-and-draft"]
    return _with_interval(found)


def shown(ratio: float) -> str:
    """Return a ratio with two digits, in bold where it is a loss."""
    return f"{ratio:.2f}" if ratio >= 1 else f"**{ratio:.2f}**"


def test_the_pages_figures_are_those_of_the_results() -> None:
    expected = figures()
    assert len(FIGURES) == len(expected)
    for words, values in expected.items():
        (row,) = [row for row in FIGURES if row[0].startswith(words)]
        assert row[1] == ", ".join(values)


def test_the_readme_quotes_rows_of_the_page() -> None:
    quoted = [row for row in page("README.md").rows if row[-1].endswith(".json`")]
    assert len(quoted) > 5
    assert [row for row in quoted if row not in FIGURES] == []


@pytest.mark.parametrize("row", BY_BATCH, ids=lambda r: r[0])
def test_trees_by_goodput_write_as_much_by_batch_as_the_results_say(row: list[str]) -> None:
    assert len(BY_BATCH) == 5
    (name,) = re.findall(r"`(\w+)\.json`", row[0])
    ratios = {batch: own["times_no_draft"]["goodput"] for batch, own in _maths(name).items()}
    assert row[1:] == [_with_interval(ratios[batch]) if batch in ratios else "–" for batch in BATCHES]


def test_the_page_says_what_goodput_writes_of_no_speculation_in_large_batches() -> None:
    """The best fixed length is that of other rounds, so it may be worse than none in these."""
    text = re.sub(r"[\[\],]", "", PAGE.text)
    for batch, words in (("8", "of no speculation there"), ("16", "at batch 16")):
        found = _result("best_length")["batch"][batch]["times_plain"]["goodput"]
        said = [f"{found[name]:.2f}".removeprefix("0") for name in ("mean", "low", "high")]
        assert f"{' '.join(said)} {words}" in text


def test_what_serving_costs_is_what_the_results_say() -> None:
    """Passes that are longer than plain ones, their goals, and what memory holds."""
    text = " ".join(page("docs/serving.md").text.split())
    eight, one = "8 × 5", "7 × 1, 1 × 5"
    for name in ("engine_verify", "engine_verify_avx2"):
        shapes = _result(name)["shapes"]
        assert f"`{name}.json`" in text
        for figure in (shapes[eight]["more_ms"], shapes[eight]["allowed_ms"], shapes[one]["more_ms"]):
            assert f"{figure:.2f}" in text
        assert f"{shapes[one]['allowed_ms']:.2f}" in text
    assert "misses its goal of 3.93" in text
    assert _result("engine_verify_avx2")["met"] == {eight: True, one: False}
    chats, texts = (_result("memory")["loads"][name] for name in ("chats of 300 tokens", "50 to 2,000 tokens"))
    assert f"held {chats['requests']} chats of 300 tokens and {texts['requests']} texts of 50 to 2,000" in text
    blocks, whole = "requests_of_blocks_of_16", "requests_of_whole_slots"
    assert f"would hold {chats[blocks]} and {texts[blocks]}, whole slots {chats[whole]}." in text
    assert chats[whole] == texts[whole]
    assert f"{chats['waste']:.1%} and {texts['waste']:.1%} held no text".replace("%", " %") in text


@pytest.mark.parametrize("row", FIGURES, ids=lambda r: r[0])
def test_the_page_quotes_only_results_of_known_code_on_two_cores(row: list[str]) -> None:
    known = json.loads((RESULTS / row[2].strip("`")).read_text())["provenance"]
    assert known["git_commit"] is not None
    assert known["git_dirty"] is False
    assert known["hardware"]["cores"] == 2
    assert known["hardware"]["gpus"] == []


def _result(name: str) -> dict[str, Any]:
    return json.loads((Path(RESULTS) / f"{name}.json").read_text())
