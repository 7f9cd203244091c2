"""README and ARCHITECTURE.md stay short and true: sizes, packages in the order of their arrows, places, figures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ..test_import_arrows import ARROWS
from .pages import ROOT, page

RESULTS = ROOT / "benchmarks" / "results"
LONGEST_CELL = 120
FIGURES = [row for row in page("README.md").rows if row[-1].endswith(".json`")]

# Question's first words in ARCHITECTURE.md → what the file it names must hold.
ANSWERS = {
    "a token accepted": r"def residual_probs",
    "the loss divided": r"process_count",
    "a 429": r"full_status",
    "a loss, draft kind": r"## A loss",
    "a machine's hardware profile": r"class Profile\b",
    "a metric": r"spec_decode_num_draft_tokens",
    "a tenant's data": r"def delete_tenant",
    "NaN in a draft's": r"finite",
    "NaN in a target's": r"not finite \(NaN",
    "the learning rate": r"def learning_rate_factor",
    "a tree planned, or nothing": r"not worth it",
    "a request's life": r"class Request\b",
    "the order of work": r"def step\b",
}


def test_the_pages_are_short() -> None:
    assert page("README.md").text.count("\n") <= 150
    assert page("ARCHITECTURE.md").text.count("\n") <= 150
    cells = [cell for row in page("ARCHITECTURE.md").rows for cell in row]
    assert len(cells) > 50
    assert [cell for cell in cells if len(cell) > LONGEST_CELL] == []


def test_the_lab_notes_open_with_their_topics() -> None:
    """A dated entry stands below a topic, and the first screen leads to every topic."""
    notes = page("docs/lab-notes.md").text
    first_screen, *topics = re.split(r"^## ", notes, flags=re.MULTILINE)
    names = [topic.splitlines()[0] for topic in topics]
    assert re.findall(r"^\| \[(.+?)\]", first_screen, re.MULTILINE) == names
    assert [name for name in names if re.match(r"\d{4}-", name)] == []
    assert all(re.findall(r"^### \d{4}-\d\d-\d\d", topic, re.MULTILINE) for topic in topics)
    assert first_screen.count("\n") <= 30


def packages_in_order() -> list[str]:
    """Return the rows of `ARROWS` that the table of packages names, from the top."""
    names: list[str] = []
    for row in page("ARCHITECTURE.md").text.split("## Where is")[0].splitlines():
        if row.startswith("| `"):
            spans = re.findall(r"`([^`]+)`", row.split("|")[1])
            names += [_part(span) for span in spans if "/" in span or span in ARROWS]
    return names


def _part(path: str) -> str:
    name = path.removeprefix("distillspec/").removesuffix(".py").rstrip("/")
    return name.replace("/", ".")


def wrongly_placed(order: list[str], arrows: dict[str, set[str]]) -> list[str]:
    """Return imports from a package further down."""
    place = {name: i for i, name in enumerate(order)}
    pairs = [(part, other) for part in order for other in arrows[part] if other in place]
    return [f"{part} imports {other}" for part, other in pairs if place[other] > place[part]]


def test_the_table_of_packages_is_whole_and_in_the_order_of_imports() -> None:
    order = packages_in_order()
    assert sorted(order) == sorted(part for part in ARROWS if part)
    assert wrongly_placed(order, ARROWS) == []
    assert wrongly_placed(["losses", "sampling"], ARROWS) == ["losses imports sampling"]


def test_the_questions_of_a_newcomer_lead_to_the_right_file() -> None:
    rows = [row for row in page("ARCHITECTURE.md").rows if row[0].endswith("?")]
    assert len(rows) == len(ANSWERS)
    for words, held in ANSWERS.items():
        found = [row for row in rows if row[0].startswith(words)]
        assert len(found) == 1, words
        file = ROOT / found[0][1].strip("`")
        assert re.search(held, file.read_text(encoding="utf-8")), f"{words}: {file.name} does not hold {held}"


def figures() -> dict[str, list[str]]:
    """Return the README's figures as the results have them, by the first words of their row."""
    exact, plain, spec = _result("exactness"), _result("engine_plain"), _result("engine_speculation")
    server, data = _result("server_overhead")["tokens_per_s_ratio"], _result("data_source")
    lookup, lengths = spec["batch"]["lookup"], _result("best_length")["batch"]
    best = {key: own["times_plain"][str(own["best_length"])]["median"] for key, own in lengths.items()}
    goodput = {key: own["goodput_over_best"] for key, own in lengths.items()}
    trees = {key: own["trees_over_goodput_chains"] for key, own in _result("trees")["batch"].items()}
    served, exported = _result("served_acceptance_eagle")["all"], _result("eagle_vllm")["ratio"]
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
        "lengths by goodput": [
            f"{shown(goodput[key]['mean'])} [{goodput[key]['low']:.2f}, {goodput[key]['high']:.2f}] at batch {key}"
            for key in ("1", "8")
        ],
        "trees by goodput": [
            f"{shown(trees[key]['mean'])} [{trees[key]['low']:.2f}, {trees[key]['high']:.2f}] at batch {key}"
            for key in ("1", "8")
        ],
        "n-grams of earlier answers": [_over_draft("proposers_eagle_ends")],
        "the same at T = 1": [_over_draft("proposers_eagle")],
        "the same on chat": [_over_draft("proposers_eagle_chat")],
        "the same on SQL": [_over_draft("proposers_eagle_sql")],
        "n-grams beside a draft on SQL": [f"{again['mean']:.2f} [{again['low']:.2f}, {again['high']:.2f}]"],
        "default proposers, shapes": _by_default("engine_speculation"),
        "those at T = 1": _by_default("engine_speculation_t1"),
        "prompt lookup": [
            f"{lookup['ratio']:.2f} with {lookup['best_length']} tokens",
            f"{lookup['goodput']:.2f} by goodput",
        ],
        "server": [f"{server['median']:.2f} [{server['low']:.2f}, {server['high']:.2f}]"],
        "tokens accepted": [f"{served['served']:.3f} and {served['evaluated']:.3f} of {served['trials']:,}"],
        "exported draft": [f"{exported:.3f}"],
        "sampling training data": [f"{data['ratio']:.2f}"],
    }


def _by_default(name: str) -> list[str]:
    """Return what an engine with default settings writes over no speculation."""
    found = _result(name)["batch"]
    return [f"{shown(found[key]['ratios']['default'])} at batch {key}" for key in ("1", "8")]


def _over_draft(name: str) -> str:
    """Return what n-grams beside the draft write over the draft alone, at batch 1."""
    found = _result(name)["batches"]["1"]["over_draft"]["ngram-and-draft"]
    return f"{shown(found['mean'])} [{found['low']:.2f}, {found['high']:.2f}]"


def shown(ratio: float) -> str:
    """Return a ratio with two digits, in bold where it is a loss."""
    return f"{ratio:.2f}" if ratio >= 1 else f"**{ratio:.2f}**"


def test_the_readmes_figures_are_those_of_the_results() -> None:
    expected = figures()
    assert len(FIGURES) == len(expected)
    for words, values in expected.items():
        (row,) = [row for row in FIGURES if row[0].startswith(words)]
        assert row[1] == ", ".join(values)


def test_the_readme_says_what_goodput_writes_of_no_speculation_in_large_batches() -> None:
    """The best fixed length is that of other rounds, so it may be worse than none in these."""
    text = re.sub(r"[\[\],]", "", page("README.md").text)
    for batch, words in (("8", "of no speculation there"), ("16", "at batch 16")):
        found = _result("best_length")["batch"][batch]["times_plain"]["goodput"]
        said = [f"{found[name]:.2f}".removeprefix("0") for name in ("mean", "low", "high")]
        assert f"{' '.join(said)} {words}" in text


def test_what_serving_costs_is_what_the_results_say() -> None:
    """Passes that are longer than plain ones, their goals, and what memory holds."""
    text = page("docs/serving.md").text
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
    assert f"held {chats['requests']} chats of 300 tokens\n  and {texts['requests']} texts of 50 to 2,000" in text
    blocks, whole = "requests_of_blocks_of_16", "requests_of_whole_slots"
    assert f"would hold {chats[blocks]} and {texts[blocks]}, whole slots {chats[whole]}." in text
    assert chats[whole] == texts[whole]
    assert f"{chats['waste']:.1%} and {texts['waste']:.1%} held no text".replace("%", " %") in text


@pytest.mark.parametrize(
    "row", [row for row in page("README.md").rows if row[-1].endswith(".json`")], ids=lambda r: r[0]
)
def test_the_readme_quotes_only_results_of_known_code_on_two_cores(row: list[str]) -> None:
    known = json.loads((RESULTS / row[2].strip("`")).read_text())["provenance"]
    assert known["git_commit"] is not None
    assert known["git_dirty"] is False
    assert known["hardware"]["cores"] == 2
    assert known["hardware"]["gpus"] == []


def _result(name: str) -> dict[str, Any]:
    return json.loads((Path(RESULTS) / f"{name}.json").read_text())
