"""README and ARCHITECTURE.md stay short and true: sizes, packages in the order of their arrows, places."""

from __future__ import annotations

import re

from ..test_import_arrows import ARROWS
from .pages import ROOT, page

LONGEST_CELL = 120

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
    "a tree planned, or nothing": r"def decide\b",
    "a request's life": r"class Request\b",
    "the order of work": r"def step\b",
}


def test_the_pages_are_short() -> None:
    assert page("README.md").text.count("\n") <= 125
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
