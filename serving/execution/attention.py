"""Choice of the attention over an engine's slots, made once by trying kernels on its device and models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from distillspec.errors import ConfigError, in_one_line
from distillspec.models import LanguageModel
from distillspec.models.ancestors import ancestor_words
from distillspec.models.few_queries import few_queries_attention, why_not
from distillspec.models.language_model import attention_heads
from distillspec.models.paged_cache import PagedCache
from distillspec.models.pages import Pages
from distillspec.models.ragged_attention import MOST_QUERIES, ragged_attention
from distillspec.models.slot_cache import Attend, SlotCache, SlotView, masked_attention, write_tokens
from distillspec.models.split_attention import split_attention
from distillspec.models.varlen_attention import varlen_attention

MASKED = "masked scaled_dot_product_attention over the slots"
SPLIT = "attention over pieces of long rows"
RAGGED = "a Triton kernel over each row's own keys, with masks for prompts"
NATIVE = "a C++ kernel over each row's own keys, with masks for prompts"
VARLEN = "torch's variable-length attention, with masks for trees"
BOTH = "a Triton kernel over each row's own keys, with torch's variable-length attention for prompts"
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # of the largest output
PAGE_TOKENS = 16
TRIED_WINDOW = 64  # a sliding window is tried at most this wide, so that it hides part of the rows it is tried on


@dataclass(frozen=True)
class _Shape:
    """Shapes that a kernel is compiled for."""

    heads: int
    kv_heads: int
    dim: int
    width: int  # tokens a row
    window: int | None = None
    softcap: float | None = None
    tree: bool = False


def choose_attention(setting: str, models: Sequence[LanguageModel], page: int = 0) -> tuple[Attend, str]:
    """Return the attention that the setting names, and its description for the log.

    A kernel is used if it runs for all the models' shapes, from one token a row to the widest window, and agrees there
    with masked attention in float32. `auto` is the C++ kernel on CPUs. On CUDA it is the Triton kernel for windows
    of drafted tokens, which splits long rows over the device, and torch's kernel for prompts. It is the one that works.

    Args:
        setting: auto, masked, split, native, triton or varlen.
        models: all that the engine runs.
        page: tokens of a page of their caches, 0 without pages.

    Raises:
        ConfigError: the setting names a kernel that does not run, or gives wrong results.
    """
    device = models[0].device
    if setting == "masked":
        return masked_attention, MASKED
    if setting == "auto" and device.type != "cuda":
        failure = why_not() or kernel_failure(few_queries_attention, models, page)
        return (few_queries_attention, NATIVE) if failure is None else (masked_attention, f"{MASKED} ({failure})")
    if setting == "auto":
        return _best(kernel_failure(ragged_attention, models, page), kernel_failure(varlen_attention, models, page))
    kernels: dict[str, tuple[Attend, str]] = {
        "split": (split_attention, SPLIT),
        "native": (few_queries_attention, NATIVE),
        "triton": (ragged_attention, RAGGED),
        "varlen": (varlen_attention, VARLEN),
    }
    attend, words = kernels[setting]
    failure = (why_not() if setting == "native" else None) or kernel_failure(attend, models, page)
    if failure is not None:
        raise ConfigError(f"attention={setting} does not work on {device} ({failure}); use attention=auto or masked")
    return attend, words


def page_tokens(setting: int | None, device: torch.device) -> int:
    """Return the tokens of a page that the setting names. CUDA has pages by default: memory is committed at once."""
    if setting is not None:
        return setting
    return PAGE_TOKENS if device.type == "cuda" else 0


def _best(no_triton: str | None, no_varlen: str | None) -> tuple[Attend, str]:
    """Return the best attention, given the failure of each kernel (None: it works)."""
    if no_triton is None and no_varlen is None:
        return partial(ragged_attention, otherwise=varlen_attention), BOTH
    if no_triton is None:
        return ragged_attention, f"{RAGGED} (no variable-length attention: {no_varlen})"
    if no_varlen is None:
        return varlen_attention, f"{VARLEN} (no Triton kernel: {no_triton})"
    return masked_attention, f"{MASKED} (no Triton kernel: {no_triton}; no variable-length attention: {no_varlen})"


def kernel_failure(attend: Attend, models: Sequence[LanguageModel], page: int = 0) -> str | None:
    """Return the reason not to use a kernel, None if it agrees with masked attention."""
    for model in models:
        if model.dtype not in TOLERANCE:
            return f"it does not compute in {str(model.dtype).removeprefix('torch.')}"
        for shape in _shapes(model):
            try:
                difference = _difference(attend, shape, model.device, model.dtype, page)  # type: ignore[arg-type]
            except Exception as error:  # a compiler has many ways to fail
                return f"{type(error).__name__}: {in_one_line(error)}"
            if not difference <= TOLERANCE[model.dtype]:
                return f"it is off by {difference:.2g} for {shape}"
    return None


def _shapes(model: LanguageModel) -> Iterator[_Shape]:
    """Yield one token a row and the widest chains and trees, in layers with and without a sliding window."""
    config = model.model.config.get_text_config()
    heads = attention_heads(model)
    softcap = getattr(config, "attn_logit_softcapping", None)
    sliding = getattr(config, "sliding_window", None) and min(config.sliding_window, TRIED_WINDOW)
    widest = max(1, MOST_QUERIES // (heads.query // heads.kv))
    for width, tree in ((1, False), (widest, False), (widest, True)):
        for window in {None, sliding}:
            yield _Shape(*heads, width, window, softcap, tree)


@cache
@torch.inference_mode()
def _difference(attend: Attend, shape: _Shape, device: torch.device, dtype: torch.dtype, page: int) -> float:
    """Return the largest difference from masked attention, as a share of the largest output, on three random rows."""
    generator = torch.Generator().manual_seed(0)
    cache = SlotCache(3, 512)
    starts, counts = torch.tensor([150, 3, 60]), torch.tensor([shape.width, max(1, shape.width // 2), shape.width])
    view = SlotView.append(cache, [0, 1, 2], starts.to(device), counts.to(device))
    if shape.tree:
        view = _with_tree(view)
    size = (3, shape.kv_heads, cache.max_len + 1, shape.dim)
    query = torch.randn(3, shape.heads, shape.width, shape.dim, generator=generator).to(device, dtype)
    keys, values = (torch.randn(size, generator=generator).to(device, dtype) for _ in range(2))
    cached = (keys, values, view) if page == 0 else _in_pages(keys, values, view, page)
    output = attend(query, *cached, window=shape.window, softcap=shape.softcap)
    wanted = masked_attention(
        query.float(), keys.float(), values.float(), view, window=shape.window, softcap=shape.softcap
    )
    real = view.places < cache.max_len
    return float((output.float() - wanted)[real].abs().max() / wanted[real].abs().max())


def _with_tree(view: SlotView) -> SlotView:
    """Return the view with a tree in each row, in which every node has two children."""
    rows, width = view.places.shape
    depths = torch.tensor([(node + 1).bit_length() - 1 for node in range(width)], device=view.places.device)
    words = ancestor_words([[(node + 1) // 2 - 1 for node in range(width)]] * rows, width)
    base = view.places[:, 0].contiguous()
    return replace(
        view, base=base, positions=base[:, None] + depths, ancestors=torch.from_numpy(words).to(view.places.device)
    )


def _in_pages(keys: Tensor, values: Tensor, view: SlotView, page: int) -> tuple[Tensor, Tensor, SlotView]:
    """Return keys and values in pages, in which neighbours belong to different slots, and the view of them."""
    slots, max_len = view.cache.slots, view.cache.max_len
    pages = Pages(slots, max_len, slots * (max_len // page + 1), page)
    for tokens in range(page, max_len + 1, page):
        for slot in range(slots):
            pages.resize(slot, tokens)
    cache = PagedCache.of(view.cache, pages, keys.device)
    cache.change_table(*(torch.from_numpy(part).to(keys.device) for part in cache.table_changes()))
    rows, places = torch.cartesian_prod(torch.arange(slots), torch.arange(max_len)).to(keys.device).T
    paged = [cache.zeros(cached, cached.shape[1], cached.shape[3]) for cached in (keys, values)]
    for cached, new in zip((keys, values), paged, strict=True):
        write_tokens(cache, new, cached[:, :, :max_len].transpose(1, 2).flatten(0, 1), rows, places, {})
    return paged[0], paged[1], replace(view, cache=cache)
