"""Fields of bodies by their present names and by earlier ones."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from distillspec.serving.server.http.schemas import ControllerBody, SpeculationOptions

BODIES = [SpeculationOptions, ControllerBody]
Body = type[SpeculationOptions] | type[ControllerBody]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("name", ["speculation_length", "max_length"])
def test_the_speculation_length_is_read_by_its_name_and_by_the_earlier_one(body: Body, name: str) -> None:
    read = body.model_validate_json(f'{{"{name}": 3}}')
    assert read.speculation_length == 3
    assert read.model_fields_set == {"speculation_length"}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("text", ['{"max_length": -1}', '{"max_length": 1, "speculation_length": 2}'])
def test_the_earlier_name_is_checked_and_both_names_are_refused(body: Body, text: str) -> None:
    with pytest.raises(ValidationError, match="max_length"):
        body.model_validate_json(text)


@pytest.mark.parametrize("body", BODIES)
def test_the_schema_lists_the_present_name(body: Body) -> None:
    fields = body.model_json_schema()["properties"]
    assert "max_length" not in fields
    assert "`max_length`, its earlier name" in fields["speculation_length"]["description"]
