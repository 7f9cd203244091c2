"""Config and tokenizer files that transformers 4 reads too. Engines lag behind, and misread files silently.

transformers 5 moved `rope_theta` into `rope_parameters` and `torch_dtype` to `dtype`, and renamed the
tokenizer class. Version 4 ignores what it does not know: a draft would run with the default rope base and
agree with nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def make_readable_for_transformers_4(folder: Path) -> None:
    """Add the older names beside the newer ones in `config.json`, and repair `tokenizer_config.json`."""
    _edit(folder / "config.json", add_older_names)
    _edit(folder / "tokenizer_config.json", _with_older_tokenizer_class)


def add_older_names(config: dict[str, Any]) -> None:
    """Add the older names of number format and rotary settings to a model's configuration, in place."""
    if "dtype" in config:
        config.setdefault("torch_dtype", config["dtype"])
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return  # none, or one set a layer type, which has no older spelling
    if "rope_theta" in rope:
        config.setdefault("rope_theta", rope["rope_theta"])
    if rope.get("rope_type", "default") != "default":
        config.setdefault("rope_scaling", {name: value for name, value in rope.items() if name != "rope_theta"})


def _with_older_tokenizer_class(config: dict[str, Any]) -> None:
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    extra = config.get("extra_special_tokens")
    if isinstance(extra, list):  # version 4 expects a mapping there
        config["additional_special_tokens"] = config.pop("extra_special_tokens")


def _edit(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    if file.is_file():
        content = json.loads(file.read_text(encoding="utf-8"))
        change(content)
        file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
