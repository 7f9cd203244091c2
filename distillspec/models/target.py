"""Loading targets: the embedded SmolLM2, a Hub id, a local folder, a GGUF file, or the tiny test model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from distillspec.config import TargetConfig
from distillspec.errors import ConfigError
from distillspec.models.gguf import embedded_gguf, unpack_gguf
from distillspec.models.language_model import LanguageModel, fingerprint
from distillspec.models.numerics import resolve_device, resolve_dtype
from distillspec.models.tiny import tiny_model, tiny_tokenizer
from distillspec.models.tokenizers import identify, tokenizer_size

TOKENIZER_FILES = (
    "*token*",
    "vocab*",
    "merges*",
    "*.model",
    "*.tiktoken",
)  # a folder with none of them has no tokenizer
EMBEDDED_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def load_target(config: TargetConfig) -> LanguageModel:
    """Load the target in evaluation mode, without gradients.

    Raises:
        ConfigError: the path or id cannot be loaded as a causal language model with a tokenizer.
    """
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    if config.path == "tiny":
        tokenizer = tiny_tokenizer()
        model: PreTrainedModel = tiny_model(tokenizer_size(tokenizer) + 5).to(dtype)
        name = "tiny"
    else:
        model, tokenizer = load_causal_lm(resolve_path(config.path), dtype)
        name = short_name(config.path)
    try:
        model.requires_grad_(False).eval().to(device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"target.path={config.path} does not fit into the memory of {device}; use a smaller "
            "model, target.dtype=bfloat16 if it is not that yet, or target.device=cpu"
        ) from error
    return wrap(model, tokenizer, name)


def short_name(path: str) -> str:
    """Return the last part of a file's or folder's path, or a Hub id unchanged."""
    return Path(os.path.abspath(Path(path).expanduser())).name if _looks_local(path) else path


def wrap(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str) -> LanguageModel:
    """Return a full-vocabulary `LanguageModel` with its identity."""
    rows = model.get_output_embeddings().weight.shape[0]
    return LanguageModel(model, tokenizer, identify(tokenizer, rows, fingerprint(model)), name)


def resolve_path(path: str) -> str:
    """Return the path to load: the embedded weights (or their Hub id) for `smollm2`, a GGUF file's unpacked folder."""
    if path == "smollm2":
        file = embedded_gguf()
        return str(unpack_gguf(file)) if file is not None else EMBEDDED_HUB_ID
    if path.endswith(".gguf"):
        if not Path(path).is_file():
            raise ConfigError(f"target.path={path}: no such file")
        return str(unpack_gguf(Path(path)))
    return path


def load_causal_lm(path: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load model and tokenizer from a folder or the Hub.

    Raises:
        ConfigError: either cannot be loaded. One line names the path and the reason.
    """
    tokenizer = load_tokenizer(path)
    with one_line_failures(path):
        return read_weights(_folder_or_id(path), dtype), tokenizer


def read_weights(folder: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load a causal language model from safetensors alone. Pickles and a model's own code could run anything."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True, trust_remote_code=False)


def load_tokenizer(path: str) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a model folder or Hub id, None for a folder that has none. Fast, even if it fails.

    Raises:
        ConfigError: it cannot be loaded. One line names the path and the reason.
    """
    folder = _folder_or_id(path)
    with one_line_failures(path):
        AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if Path(folder).is_dir() and not any(any(Path(folder).glob(name)) for name in TOKENIZER_FILES):
            return None
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _folder_or_id(path: str) -> str:
    local = _looks_local(path)
    folder = str(Path(path).expanduser()) if local else path
    if local and not (Path(folder) / "config.json").is_file():
        raise ConfigError(f"{path} is not a model folder: it has no config.json")
    return folder


def _looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or Path(path).exists()


@contextmanager
def one_line_failures(path: str) -> Iterator[None]:
    """Turn any failure to load `path` into one `ConfigError` that names it."""
    try:
        yield
    except Exception as error:  # every library underneath (safetensors, tokenizers, the Hub) has types of its own
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if "ignore_mismatched_sizes" in reason:  # transformers reports the shapes beside its error
            reason = "a weight has another shape than config.json says"
        elif "no file named" in str(error) or "not appear to have a file named" in str(error):
            reason = _no_safetensors(path, reason)
        elif "trust_remote_code" in str(error):
            reason = "it needs code of its own, which is never run; use a model that transformers knows"
        raise ConfigError(f"cannot load {path} as a causal language model: {reason}") from error


def _no_safetensors(path: str, reason: str) -> str:
    """Return the reason why weights are missing, with the way out if they are pickled."""
    if "safetensors" not in reason:
        return reason
    return (
        "it has no weights as safetensors, and pickled ones (pytorch_model.bin) are not read, since they can run code;"
        f" if you trust them, convert once: AutoModelForCausalLM.from_pretrained({path!r}).save_pretrained(FOLDER),"
        " and the tokenizer likewise"
    )
