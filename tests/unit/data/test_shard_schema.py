"""Columns survive pack and unpack, absent ones stay absent, and what does not fit is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from distillspec.data.shard_schema import (
    COLUMNS,
    FEATURES,
    NODES,
    PROMPT,
    RESPONSE,
    Column,
    Columns,
    SchemaError,
    check,
    pack,
    unpack,
)

SIZES = {"entries": 3, "draws": 2, "hidden_size": 5, "feature_size": 7, "feature_count": 4, "node_entries": 2}
OPTIONAL = [column for column in COLUMNS if not column.required]
REQUIRED = [column for column in COLUMNS if column.required]


def values(column: Column, number: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return values of one sample, in the column's first dtype; sample `number` has 2 + number response tokens."""
    some = {PROMPT: number + 1, RESPONSE: number + 2, FEATURES: 2 * number + 3, NODES: 3 * number}
    rows = [] if column.offsets is None else [some[column.offsets]]
    shape = [*rows, *(SIZES[name] for name in column.shape)]
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 2, shape, generator=generator).to(dtype or column.dtypes[0])


def sample(number: int, *columns: Column) -> Columns:
    return {column.name: values(column, number) for column in (*REQUIRED, *columns)}


def assert_equal(ours: list[Columns], theirs: list[Columns]) -> None:
    assert [set(own) for own in ours] == [set(own) for own in theirs]
    for own, other in zip(ours, theirs, strict=True):
        for name in own:
            assert own[name].dtype == other[name].dtype, name
            assert torch.equal(own[name], other[name]), name


@pytest.mark.parametrize("column", OPTIONAL, ids=lambda column: column.name)
def test_an_optional_column_comes_back_alone_and_among_all(column: Column) -> None:
    alone = [sample(number, column) for number in range(4)]
    packed = pack(alone)
    assert set(packed) & {other.name for other in OPTIONAL} == {column.name}
    assert_equal(unpack(packed), alone)
    everything = [sample(number, *OPTIONAL) for number in range(4)]
    assert_equal(unpack(pack(everything)), everything)


@pytest.mark.parametrize(
    ("column", "dtype"), [(column, dtype) for column in COLUMNS for dtype in column.dtypes if dtype != torch.uint16]
)
def test_every_declared_dtype_comes_back_as_it_was(column: Column, dtype: torch.dtype) -> None:
    samples = [sample(number, *OPTIONAL) | {column.name: values(column, number, dtype)} for number in range(2)]
    assert_equal(unpack(pack(samples)), samples)


def test_what_no_sample_has_stays_absent() -> None:
    samples = [sample(number) for number in range(3)]
    assert set(pack(samples)) == {*(column.name for column in REQUIRED), PROMPT, RESPONSE}
    assert_equal(unpack(pack(samples)), samples)


@pytest.mark.parametrize("column", OPTIONAL, ids=lambda column: column.name)
def test_what_one_sample_lacks_goes_unless_it_can_be_filled(column: Column) -> None:
    samples = [sample(0, column), sample(1), sample(2, column)]
    back = unpack(pack(samples))
    kept = column.fill is not None
    assert [column.name in own for own in back] == [kept, False, kept]
    assert_equal(back, samples if kept else [sample(number) for number in range(3)])


def test_ids_take_two_bytes_where_all_fit_and_four_where_one_does_not() -> None:
    ids = next(column for column in COLUMNS if column.name == "signal_ids")
    for extreme, stored in ((65535, torch.uint16), (65536, torch.int32), (-1, torch.int32)):
        samples = [sample(number, ids) for number in range(2)]
        samples[1]["signal_ids"][0, 0] = extreme
        packed = pack(samples)
        assert packed["signal_ids"].dtype == stored
        assert packed["prompt_tokens"].dtype == torch.uint16
        assert_equal(unpack(packed), samples)


def without(name: str) -> list[Columns]:
    return [{key: value for key, value in sample(number).items() if key != name} for number in range(2)]


@pytest.mark.parametrize("column", REQUIRED, ids=lambda column: column.name)
def test_a_required_column_is_missed_when_written_and_when_read(column: Column) -> None:
    with pytest.raises(SchemaError, match=f"column {column.name} is missing"):
        pack(without(column.name))
    packed = pack([sample(0)])
    del packed[column.name]
    with pytest.raises(SchemaError, match=f"column {column.name} is missing"):
        check(packed)


def test_columns_that_do_not_fit_are_refused_by_name() -> None:
    one = sample(0, *OPTIONAL)
    for name, wrong, message in (
        ("surprise", torch.zeros(2), "surprise is not in the shard schema"),
        ("outcomes", one["outcomes"].int(), r"outcomes is torch\.int32"),
        ("outcomes", one["outcomes"][:1], "outcomes has not as many rows"),
        ("hidden", one["log_z"], "hidden is torch.float32 with 1 dimensions"),
    ):
        with pytest.raises(SchemaError, match=message):
            pack([one | {name: wrong}])
    with pytest.raises(SchemaError, match="hidden differs in shape"):
        pack([one, sample(1, *OPTIONAL) | {"hidden": torch.zeros(3, 6)}])
    packed = pack([one])
    for name, wrong, message in (
        ("signal_tail", packed["signal_tail"][:-1], "signal_tail has 1 rows, not 2"),
        ("group_id", torch.zeros(2, dtype=torch.int64), "group_id has 2 rows, not 1"),
    ):
        with pytest.raises(SchemaError, match=message):
            unpack(packed | {name: wrong})
    del packed[FEATURES]
    with pytest.raises(SchemaError, match="feature_offsets is missing"):
        unpack(packed)


def test_no_two_columns_share_a_name_and_only_reals_are_filled() -> None:
    assert len({column.name for column in COLUMNS}) == len(COLUMNS)
    filled = [column for column in COLUMNS if column.fill is not None]
    assert all(column.dtypes[0].is_floating_point and not column.required for column in filled)
