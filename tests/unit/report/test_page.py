"""The page is well-formed, self-contained, and names what is missing."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from distillspec.errors import ConfigError
from distillspec.report import write_report

from .conftest import PROVENANCE, interval, metrics, result, train_summary
from .svg_elements import with_class

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Parser that checks nesting and collects visible text, tags and attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.pieces: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.pieces.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.pieces))


def page_of(tmp_path: Path, *runs: Path, title: str = "Distilling a draft") -> Page:
    output = write_report(list(runs), tmp_path / "report.html", title)
    return Page(output.read_text(encoding="utf-8"))


def test_a_train_run_shows_gain_curves_costs_and_how_to_repeat_it(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    run = make_run("first", train_summary(result(0.021), result(0.474)), rows=metrics())
    page = page_of(tmp_path, run, title="Four layers")
    for expected in (
        "Four layers",
        "0.021 → 0.474",
        "95 % interval 0.454–0.494",
        "ceiling 0.962",
        "95 % interval 1.14–1.24×",
        "best 1.33× at γ = 2",
        "the best γ is between 1 and 3",
        "1.33× 1.28–1.38, γ = 2",
        "1.02 0.99–1.05",
        "73% of the held-out answers were cut at the token limit",
        "22.0 → 26.2 tokens/s",
        "Speculation pays: best at gamma 2.",
        "ran at 1.19× plain decoding: clearly faster.",
        "distill train loss=fkl train.max_minutes=10",
        "commit 0123456789ab",
        "A processor, 2 cores, 16 GiB",
        "path: smollm2",
        "64 held-out prompts",
        "maths",
        "30.0 ms",
        "truncated vocabulary bounds α at 0.962",
    ):
        assert expected in page.text, expected
    assert page.tags.count("svg") == 6  # loss, α, domains, τ, speed-up at two batch sizes


def test_it_loads_nothing_runs_nothing_and_follows_the_readers_scheme(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    page = page_of(tmp_path, make_run("run", train_summary(result(0.02), result(0.4)), rows=metrics()))
    html = (tmp_path / "report.html").read_text()
    assert {"script", "link", "img", "iframe", "object"} & set(page.tags) == set()
    assert {"src", "href"} & {name for name, _ in page.attributes} == set()
    assert re.search(r"https?://|@import|url\(", html) is None
    assert "prefers-color-scheme: dark" in html
    assert ("content", "light dark") in page.attributes


def test_names_from_outside_are_escaped(make_run: Callable[..., Path], tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    hostile = result(0.4, draft=evil)
    hostile["alpha_by_domain"] = {evil: hostile["alpha"], "b": hostile["alpha"]}
    hostile["speedup"]["1"]["verdict"] = evil
    run = make_run(
        "run",
        {"command": "eval", "results": [hostile, result(0.3, draft="$body ${title}")]},
        config=f"key: {evil}",
        provenance={**PROVENANCE, "argv": ["distill", evil], "os": evil, "packages": {evil: evil}},
    )
    page = page_of(tmp_path, run, title=evil)
    assert "img" not in page.tags
    assert evil in page.text
    assert "$body ${title}" in page.text


def test_several_runs_are_compared_and_the_best_one_leads(make_run: Callable[..., Path], tmp_path: Path) -> None:
    first = make_run("a/run", train_summary(result(0.02), result(0.31)), rows=metrics())
    second = make_run("b/run", train_summary(result(0.02), result(0.52)), rows=metrics(30))
    third = make_run("eval", {"command": "eval", "results": [result(0.4, "out/x"), result(0.45, "out/y")]})
    page = page_of(tmp_path, first, second, third)
    assert "Highest acceptance: b/run" in page.text
    assert "0.020 → 0.520" in page.text
    for label in ("a/run, before", "a/run", "b/run", "x", "y"):
        assert label in page.text
    assert page.text.count("distill train loss=fkl") == 3


def test_many_drafts_share_a_heat_map(make_run: Callable[..., Path], tmp_path: Path) -> None:
    results = [result(0.1 * i, f"draft-{i}") for i in range(1, 7)]
    page = page_of(tmp_path, make_run("eval", {"command": "eval", "results": results}))
    assert ("class", "cell") in page.attributes
    assert ("class", "bar c1") not in page.attributes


def test_acceptance_by_drafted_token_is_a_chart_and_a_sentence(make_run: Callable[..., Path], tmp_path: Path) -> None:
    before, after = result(0.1), result(0.5, "reader")
    before["alpha_by_position"] = [interval(0.1)] * 4
    after["alpha_by_position"] = [interval(alpha) for alpha in (0.5, 0.45, 0.4, 0.381)]
    after["alpha_by_position"] += [interval(0.0, 0.0)] * 4  # behind the end of its block
    page = page_of(tmp_path, make_run("run", train_summary(before, after), rows=metrics()))
    assert page.tags.count("svg") == 7
    alone = page_of(tmp_path, make_run("eval", {"command": "eval", "results": [after]}))
    picture = re.search(r"α by drafted token</figcaption>(<svg.*?</svg>)", (tmp_path / "report.html").read_text(), re.S)
    assert picture is not None
    assert [text.text for text in with_class(picture[1], "value")] == ["0.500", "0.450", "0.400", "0.381"]
    assert (
        "The target accepts 0.50 of the tokens drafted first and 0.38 of those at place 4, and decoding for "
        "real at γ = 4 ran at 1.24× plain decoding: clearly faster." in alone.text
    )


def test_where_all_drafted_tokens_are_accepted_alike_there_is_no_such_chart(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    alike = result(0.5)
    alike["alpha_by_position"] = [alike["alpha"]] * 4
    page = page_of(tmp_path, make_run("run", train_summary(None, alike), rows=metrics()))
    assert "α by drafted token" not in page.text


def test_missing_pieces_are_named_not_invented(make_run: Callable[..., Path], tmp_path: Path) -> None:
    after = result(0.4, cost=False, measured=False)
    for key in ("alpha_by_domain", "ceiling", "greedy_agreement", "policy"):
        del after[key]
    run = make_run("run", train_summary(None, after), config=None, provenance=None)
    page = page_of(tmp_path, run)
    for expected in (
        "No metrics.jsonl was found",
        "Costs were not measured",
        "not measured",
        "does not say whether it pays",
        "No command recorded",
        "No config.yaml was found",
        "was not evaluated before training",
        "an unrecorded policy",
    ):
        assert expected in page.text, expected
    assert re.search(r"\bnan\b", page.text.lower()) is None


def test_metrics_that_are_not_numbers_or_cut_short_are_skipped(make_run: Callable[..., Path], tmp_path: Path) -> None:
    rows = metrics(20)
    rows[3]["train/loss"] = float("nan")
    run = make_run("run", train_summary(result(0.02), result(0.4)), rows=rows)
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 21, "train/lo')
    page = page_of(tmp_path, run)
    assert all("nan" not in value for name, value in page.attributes if name == "points")
    assert "no values recorded" not in page.text


def test_what_was_measured_at_a_batch_size_is_in_its_chart(make_run: Callable[..., Path], tmp_path: Path) -> None:
    after = result(0.4)
    before = page_of(tmp_path, make_run("a", train_summary(None, after), rows=metrics())).tags.count("circle")
    after["measured_at"] = {"8": after["measured"]}
    page = page_of(tmp_path, make_run("b", train_summary(None, after), rows=metrics()))
    assert page.tags.count("circle") == before + 1


def test_predictions_have_bands(make_run: Callable[..., Path], tmp_path: Path) -> None:
    with_bands = page_of(tmp_path, make_run("a", train_summary(None, result(0.4)), rows=metrics()))
    old = result(0.4)
    for batch in ("1", "8"):
        del old["speedup"][batch]["intervals"]
    without = page_of(tmp_path, make_run("b", train_summary(None, old), rows=metrics()))
    assert with_bands.tags.count("polygon") == without.tags.count("polygon") + 2
    assert "recorded without an interval: evaluate again before quoting it" in without.text
    assert "recorded without an interval" not in with_bands.text


def test_prompts_that_chose_the_checkpoint_and_cut_training_answers_are_told(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    summary = train_summary(None, result(0.4))
    assert "which flatters it a little" in page_of(tmp_path, make_run("old", summary)).text
    summary |= {"selection_prompts": 12, "training_answers_cut": 0.6}
    text = page_of(tmp_path, make_run("new", summary)).text
    assert "picked on 12 other held-out prompts than those quoted here" in text
    assert "60% of the training answers were cut at the token limit" in text
    assert "flatters" not in text


def test_a_result_that_breaks_even_by_chance_is_not_called_faster(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    after = result(0.4)
    after["measured"]["ratio"] = {"mean": 1.02, "low": 0.95, "high": 1.09}
    text = page_of(tmp_path, make_run("run", train_summary(None, after), rows=metrics())).text
    assert "ran at 1.02× plain decoding: too close to call." in text
    assert "server's defaults" not in text
    after["measured"] |= {"ratio": {"mean": 1.2, "low": 1.1, "high": 1.3}, "prompts": 3}
    text = page_of(tmp_path, make_run("few", train_summary(None, after), rows=metrics())).text
    assert "ran at 1.20× plain decoding: too close to call." in text
    after["measured"] |= {"served": {"mean": 1.4, "low": 1.3, "high": 1.5}, "prompts": 12}
    text = page_of(tmp_path, make_run("served", train_summary(None, after), rows=metrics())).text
    assert "choose lengths by goodput, ran at 1.40×: clearly faster." in text
    assert "as served: 1.40× 1.30–1.50×" in text


def test_caveats_tell_of_skipped_steps_dirty_code_few_prompts_and_mixed_policies(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    greedy = copy.deepcopy(result(0.5))
    greedy["policy"] = {"temperature": 0.0}
    greedy["prompts"] = 8
    summary = {**train_summary(result(0.02), greedy), "bad_steps": 3}
    summary["target_change"] = {"line": "the target trained too: KL 0.03"}
    run = make_run("run", summary, rows=metrics(), provenance={**PROVENANCE, "git_dirty": True})
    text = page_of(tmp_path, run).text
    for expected in (
        "3 training steps were skipped",
        "run: the target trained too: KL 0.03.",
        "uncommitted changes, so the commit alone",
        "That is few",
        "different policies (greedy; temperature 1)",
    ):
        assert expected in text, expected


@pytest.mark.parametrize(
    ("summary", "message"),
    [
        (None, "has no summary.json"),
        ({"command": "generate"}, "is a run of 'generate'"),
        ({"command": "train", "before": None}, "has no after"),
        ({"command": "train", "after": {"draft": "d", "tau": [1]}}, "after lacks alpha"),
        ({"command": "eval", "results": []}, "has no results"),
        ({"command": "eval", "results": [{"alpha": {"mean": 1}}]}, r"results\[0\] lacks draft, tau"),
    ],
)
def test_an_unreadable_run_is_refused_with_its_name_and_what_it_lacks(
    summary: dict[str, Any] | None, message: str, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    run = make_run("broken-run", summary)
    with pytest.raises(ConfigError, match=message) as caught:
        write_report([run], tmp_path / "report.html")
    assert str(run) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "report.html").exists()


def test_a_missing_folder_and_broken_json_are_refused(make_run: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        write_report([tmp_path / "nowhere"], tmp_path / "report.html")
    with pytest.raises(ConfigError, match="nothing to report on"):
        write_report([], tmp_path / "report.html")
    run = make_run("run", None)
    (run / "summary.json").write_text('{"command": ')
    with pytest.raises(ConfigError, match="not readable JSON"):
        write_report([run], tmp_path / "report.html")
