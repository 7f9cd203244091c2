"""Prompts from files: formats, columns, and a split that never changes."""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distillspec.config import DataConfig
from distillspec.data import prompts as prompts_module
from distillspec.data.folder import DataFolder, find_data_folder
from distillspec.data.prompts import PromptSet, load_prompts, prompt_key, stable_seed
from distillspec.errors import ConfigError
from distillspec.models.tiny import tiny_tokenizer
from distillspec.types import Prompt, SamplingPolicy

TOKENIZER = tiny_tokenizer()
ROWS = [{"prompt": f"Question {i}?", "response": f"Answer {i}.", "domain": ["even", "odd"][i % 2]} for i in range(12)]


def write(folder: Path, rows: list[dict[str, Any]], kind: str) -> str:
    path = folder / f"prompts.{kind}"
    if kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "csv":
        with path.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def load(path: str, avoid: Collection[str] = (), **settings: Any) -> PromptSet:
    return load_prompts(DataConfig(prompts=path, **{"eval_prompts": 4, **settings}), TOKENIZER, avoid)


def keys(prompts: Iterable[Prompt]) -> set[str]:
    return {prompt_key(p.token_ids) for p in prompts}


def questions(prompts: PromptSet) -> list[str]:
    found = [TOKENIZER.decode(list(p.token_ids), skip_special_tokens=True) for p in prompts.held_out + prompts.train]
    return [text.split("\n")[1] for text in found]


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "parquet"])
def test_every_format_gives_the_same_prompts(tmp_path: Path, kind: str) -> None:
    prompts = load(write(tmp_path, ROWS, kind))
    assert len(prompts.held_out) == 4
    assert len(prompts.train) == 8
    by_id = {p.id: p for p in prompts.train + prompts.held_out}
    assert sorted(by_id, key=int) == [str(i) for i in range(12)]
    assert by_id["7"].domain == "odd"
    assert by_id["7"].response == "Answer 7."
    assert TOKENIZER.decode(by_id["7"].token_ids).startswith("<|im_start|>user\nQuestion 7?<|im_end|>")


def test_the_split_is_stable_disjoint_and_independent_of_the_number_trained_on(tmp_path: Path) -> None:
    path = write(tmp_path, ROWS, "jsonl")
    first, again, fewer = load(path), load(path), load(path, num_prompts=3)
    assert first == again
    assert fewer.held_out == first.held_out
    assert fewer.train == first.train[:3]
    assert not {p.id for p in first.train} & {p.id for p in first.held_out}


def test_what_is_held_out_depends_on_the_prompts_alone(tmp_path: Path) -> None:
    """A part of the file, in another order, with other counts: nothing changes sides."""
    rows = [{"prompt": f"Question {i}?"} for i in range(400)]
    whole = load(write(tmp_path, rows, "jsonl"))
    (tmp_path / "part").mkdir()
    part = load(write(tmp_path / "part", rows[300::-1], "csv"), eval_prompts=9, num_prompts=250)
    assert len(part.held_out) == 9
    assert not keys(part.held_out) & keys(whole.train)
    assert not keys(whole.held_out) & keys(part.train)


def test_prompts_a_draft_was_trained_on_are_not_held_out(tmp_path: Path) -> None:
    path = write(tmp_path, ROWS, "jsonl")
    trained = keys(load(path, eval_prompts=2).train)
    more = load(path, trained, eval_prompts=8)
    assert keys(more.held_out) == keys(load(path, eval_prompts=2).held_out)
    assert len(load(path, trained, eval_prompts=1).held_out) == 1


def test_a_split_that_can_hold_nothing_out_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, [{"prompt": f"q{i}"} for i in range(20)], "jsonl")
    every = load(path)
    with pytest.raises(ConfigError, match=r"chosen by all prompts of data\.prompts=.*; add prompts or give"):
        load(path, keys([*every.train, *every.held_out]))


def test_no_more_rows_are_read_than_the_split_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    plain = prompts_module.make_prompt
    monkeypatch.setattr(prompts_module, "make_prompt", lambda row, n, *rest: made.append(n) or plain(row, n, *rest))
    path = write(tmp_path, [{"prompt": f"Question {i}?"} for i in range(5000)], "jsonl")
    split = load(path, num_prompts=50, eval_prompts=4)
    assert (len(split.train), len(split.held_out)) == (50, 4)
    assert len(made) <= 2 * prompts_module.ROWS_AT_ONCE
    assert max(made) > 2500  # from all over the file


def test_repeated_prompts_count_once(tmp_path: Path) -> None:
    prompts = load(write(tmp_path, ROWS + ROWS[:6], "jsonl"))
    assert len(prompts.train) + len(prompts.held_out) == 12
    assert len(set(questions(prompts))) == 12


def test_several_responses_to_a_prompt_are_samples_of_their_own_on_one_side(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {i}", "response": f"answer {n}"} for i in range(6) for n in (0, 0, 1)]
    path = write(tmp_path, rows, "jsonl")
    prompts = load(path, eval_prompts=2, source="fixed")
    assert len(prompts.held_out) == len(keys(prompts.held_out)) == 2
    assert len(prompts.train) == 8
    assert len(keys(prompts.train)) == 4
    assert not keys(prompts.train) & keys(prompts.held_out)
    assert len({p.id for p in prompts.train}) == 8
    assert {p.response for p in prompts.train} == {"answer 0", "answer 1"}
    with pytest.raises(ConfigError, match="gives 6 usable prompts, not more than"):
        load(path, eval_prompts=6, source="fixed")
    sampled = load(path, eval_prompts=2)
    assert len(sampled.train) == 4, "the target answers a prompt once"


def test_ids_are_the_files_own_and_made_distinct_where_they_repeat(tmp_path: Path) -> None:
    rows = [{"id": "same" if i < 3 else f"row-{i}", "prompt": f"Question {i}?"} for i in range(8)]
    prompts = load(write(tmp_path, rows, "jsonl"))
    ids = [p.id for p in prompts.train + prompts.held_out]
    assert len(set(ids)) == 8
    assert {"same", "row-5"} <= set(ids)


def test_long_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    long = {"prompt": "x" * 500, "response": "y", "domain": "even"}
    prompts = load(write(tmp_path, [*ROWS, long], "jsonl"), max_prompt_tokens=100)
    assert prompts.dropped_long == 1
    assert len(prompts.train) + len(prompts.held_out) == 12


def test_message_lists_are_prompts_too(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "system", "content": "Brief."}, {"role": "user", "content": f"Question {i}?"}]}
        for i in range(6)
    ]
    prompts = load(write(tmp_path, rows, "jsonl"))
    assert TOKENIZER.decode(prompts.train[0].token_ids).startswith("<|im_start|>system\nBrief.<|im_end|>")


def test_other_column_names_are_settings(tmp_path: Path) -> None:
    rows = [{"q": f"Question {i}?", "a": f"Answer {i}.", "kind": "maths"} for i in range(6)]
    settings = {"prompt_field": "q", "response_field": "a", "domain_field": "kind", "source": "fixed"}
    prompts = load(write(tmp_path, rows, "csv"), **settings)
    assert prompts.train[0].domain == "maths"
    assert str(prompts.train[0].response).startswith("Answer")


def test_numbers_are_answers_too(tmp_path: Path) -> None:
    """A CSV column of sums is read as integers."""
    rows = [{"prompt": f"{i} + {i}?", "response": 2 * i} for i in range(6)]
    prompts = load(write(tmp_path, rows, "csv"), source="fixed")
    by_id = {p.id: p.response for p in prompts.train + prompts.held_out}
    assert by_id["3"] == "6"
    assert by_id["0"] == "0"


@pytest.mark.parametrize(
    ("rows", "settings", "said"),
    [
        (ROWS, {"prompt_field": "question"}, r"data.prompt_field=question is not a column.*prompt, response, domain"),
        ([{"prompt": "a b c"}] * 6, {"source": "fixed"}, "data.response_field=response is not a column"),
        (ROWS, {"eval_prompts": 12}, "gives 12 usable prompts, not more than data.eval_prompts=12"),
        ([{"prompt": i} for i in range(9)], {}, "data.prompt_field=prompt: row 0 is int, not text or messages"),
        ([{"prompt": ["a", "b"]} for i in range(9)], {}, "row 0 is not a list of messages with role and content"),
        (
            [{"prompt": [{"role": "user", "content": None}]} for i in range(9)],
            {},
            "row 0 is not a list of messages with role and content, both of them text",
        ),
        (
            [{"prompt": [{"role": None, "content": "a"}]} for i in range(9)],
            {},
            "row 0 is not a list of messages with role and content, both of them text",
        ),
        ([{"prompt": []}] * 9, {}, "row 0 has no messages; give a text, or the user.s messages"),
        (
            [{"prompt": [{"role": "assistant", "content": "Hi."}]}] * 9,
            {},
            "row 0 has messages of the assistant alone; add the user.s before them",
        ),
        (
            [{"prompt": f"{i}?", "response": ["a"]} for i in range(9)],
            {"source": "fixed"},
            "data.response_field=response: row 0 is list, not text",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(
    tmp_path: Path, rows: list[dict[str, Any]], settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        load(write(tmp_path, rows, "jsonl"), **settings)
    assert "\n" not in str(refused.value)


def test_an_answer_at_the_end_of_messages_is_left_to_the_target(tmp_path: Path) -> None:
    def turns(*said: tuple[str, str]) -> dict[str, Any]:
        return {"prompt": [{"role": role, "content": content} for role, content in said]}

    opening, answers = ("assistant", "Yes?"), (("assistant", "a"), ("assistant", "b"))
    rows = [turns(opening, ("user", f"Question {i}?"), *answers) for i in range(6)]
    text = TOKENIZER.decode(load(write(tmp_path, rows, "jsonl")).train[0].token_ids)
    assert text.startswith("<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>user\nQuestion")
    assert text.endswith("?<|im_end|>\n<|im_start|>assistant\n")


def test_a_row_that_the_template_refuses_is_named(tmp_path: Path) -> None:
    strict = tiny_tokenizer()
    strict.chat_template = "{{ raise_exception('no system role') if messages[0].role == 'system' else 'hi' }}"
    rows = [{"prompt": [{"role": role, "content": "Be brief."}]} for role in ("user", "system")]
    path = write(tmp_path, rows, "jsonl")
    with pytest.raises(ConfigError, match="prompt: row 1 does not fit the target's chat template: no system role"):
        load_prompts(DataConfig(prompts=path, eval_prompts=1), strict)


def test_a_response_column_is_required_only_where_responses_are_used(tmp_path: Path) -> None:
    rows = [{"prompt": f"Question {i}?"} for i in range(8)]
    assert len(load(write(tmp_path, rows, "jsonl"), source="teacher", mixed_with="fixed").train) == 4


@pytest.mark.parametrize("content", ["{not json", ""])
def test_an_unreadable_file_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"broken\.jsonl cannot be read") as refused:
        load(str(path))
    assert "\n" not in str(refused.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"data\.prompts=nowhere\.jsonl: no such file"):
        load("nowhere.jsonl")


def test_seeds_are_the_same_everywhere_and_differ_by_every_part() -> None:
    assert stable_seed(0, "p1") == 524125638559256450
    assert len({stable_seed(0, "p1"), stable_seed(1, "p1"), stable_seed(0, "p2"), stable_seed(0, "p", 1)}) == 4


def test_a_data_folder_gives_back_its_prompts_and_keeps_policies_apart(tmp_path: Path) -> None:
    prompts = load(write(tmp_path, ROWS, "jsonl"))
    folder = DataFolder(tmp_path / "run" / "data")
    assert not folder.has_prompts
    folder.write_prompts(prompts)
    again = find_data_folder(str(tmp_path / "run"))
    assert again.root == folder.root
    assert (again.read_prompts().train, again.read_prompts().held_out) == (prompts.train, prompts.held_out)
    places = {folder.held_out(SamplingPolicy(t), n) for t in (0.0, 1.0) for n in (8, 16)}
    assert len(places) == 4


def test_a_folder_without_prompts_is_no_data_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a data folder: it has no prompts\.jsonl"):
        find_data_folder(str(tmp_path))
    with pytest.raises(ConfigError, match="is not a data folder"):
        DataFolder(tmp_path).read_prompts()
