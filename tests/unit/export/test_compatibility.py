"""Older names beside newer ones, so that engines on transformers 4 do not misread an export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distillspec.export.compatibility import make_readable_for_transformers_4


def converted(folder: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> tuple[dict, dict]:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    make_readable_for_transformers_4(folder)
    return tuple(json.loads((folder / f"{name}.json").read_text()) for name in ("config", "tokenizer_config"))


def test_scaled_rope_is_spelt_both_ways(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    config, _ = converted(tmp_path, {"rope_parameters": rope}, {})
    assert config["rope_theta"] == 5e5
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert config["rope_parameters"] == rope


@pytest.mark.parametrize("rope", [None, {"full_attention": {"rope_theta": 1e4}}])
def test_rope_without_an_older_spelling_is_left_alone(tmp_path: Path, rope: Any) -> None:
    config, _ = converted(tmp_path, {"rope_parameters": rope}, {})
    assert config == {"rope_parameters": rope}


def test_the_tokenizer_class_and_extra_tokens_take_their_older_form(tmp_path: Path) -> None:
    tokenizer = {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<a>"]}
    _, mended = converted(tmp_path, {}, tokenizer)
    assert mended == {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["<a>"]}
    _, kept = converted(tmp_path, {}, {"tokenizer_class": "GPT2Tokenizer", "extra_special_tokens": {"a": "<a>"}})
    assert kept == {"tokenizer_class": "GPT2Tokenizer", "extra_special_tokens": {"a": "<a>"}}
