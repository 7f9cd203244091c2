"""A decoder compiled on CPUs, for any number of tokens, in the background.

Compiling fuses what lies between the matrix products and the attention, which at few tokens takes a third of a pass. It
takes a minute or two the first time, seconds when the compiler's cache on disk knows it. The decoder runs as it is
until the code is ready, and for ever if compiling fails. Layers compiled one by one gained nothing on two threads:
the cost of each call took all of it.

Code is made for a number of threads. Torch would compile it anew in the middle of a pass that has another number. Such
passes run as they are.

The cache is `TORCHINDUCTOR_CACHE_DIR` where that is set, else a folder that, unlike torch's own choice, is still there
after the machine was restarted.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from distillspec.errors import in_one_line
from distillspec.models import LanguageModel
from distillspec.models.slot_attention import CacheView, passing_view
from distillspec.models.slot_cache import SlotCache
from distillspec.native.library import cache_folder
from distillspec.serving.execution.background_call import BackgroundCall
from distillspec.serving.execution.flat_batch import FlatBatch
from distillspec.serving.execution.row_input import RowInput

log = logging.getLogger(__name__)

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
WARM_ROWS = ((1,), (2, 1))  # tokens of the rows of the warm-up passes: compilers treat one token apart
WARM_LEN = 8


class CompiledDecoder:
    """The decoder of one model, which calls compiled code once it is ready.

    Args:
        model: hooked, with its packed weights attached.
        after_s: seconds of passes before compiling is worth its price.
        wait: compile before the first pass, in the caller's thread.
    """

    def __init__(self, model: LanguageModel, *, after_s: float = 0.0, wait: bool = False) -> None:
        self.model, self._after_s = model, after_s
        self._codes: dict[int, Callable[..., Any]] = {}  # by the threads that they are made for
        self._spent_s: dict[int, float] = {}  # by threads
        self._tried: set[int] = set()  # threads that compiling was begun for
        self._background: BackgroundCall | None = None
        self._compiler: int | None = None  # thread that may call new code, before all threads do
        self._new: Callable[..., Any] | None = None  # that new code
        model.decoder.forward = self._forward
        if wait:
            self._tried.add(torch.get_num_threads())
            self._compile()

    @property
    def ready(self) -> bool:
        """True if there is code for as many threads as this thread computes with now."""
        return torch.get_num_threads() in self._codes

    def spent(self, seconds: float) -> None:
        """Count the seconds of a pass. Compiling begins in the background when there were enough.

        It begins anew for another number of threads. What it made for this number before is kept.
        """
        threads = BackgroundCall.usual_threads()
        self._spent_s[threads] = self._spent_s.get(threads, 0.0) + seconds
        idle = self._background is None or not self._background.running
        if threads not in self._tried and self._spent_s[threads] >= self._after_s and idle:
            self._tried.add(threads)
            self._background = BackgroundCall(self._compile)  # with the passes' threads
        if self._background is not None:
            self._background.give_way()

    def join(self) -> None:
        """Wait until nothing is being compiled."""
        if self._background is not None:
            self._background.join()

    def detach(self) -> None:
        """Give the decoder back as it was."""
        self._codes.clear()
        self.model.decoder.__dict__.pop("forward", None)

    def _forward(self, *args: Any, slot_view: CacheView | None = None, **kwargs: Any) -> Any:
        decoder = self.model.decoder
        compiling = threading.get_ident() == self._compiler
        code = self._new if compiling else self._codes.get(torch.get_num_threads())
        if slot_view is not None and code is not None:
            try:
                # The code is for tensors that begin their storage, not for parts of one upload.
                copied = {name: value.clone() if isinstance(value, Tensor) else value for name, value in kwargs.items()}
                with passing_view(slot_view):
                    return code(decoder, *args, **copied)
            except Exception as error:
                if compiling:
                    raise
                self._failed(error)  # a compiler has many ways to fail, and serving must go on
        return type(decoder).forward(decoder, *args, slot_view=slot_view, **kwargs)

    @torch.inference_mode()
    def _compile(self) -> None:
        """Run the compiled decoder over a cache of its own, for each number of tokens that is treated apart."""
        started = time.perf_counter()
        self._compiler = threading.get_ident()
        try:
            if CACHE_VARIABLE not in os.environ:
                os.environ[CACHE_VARIABLE] = str(cache_folder("compiled"))
            self._new = _compiled(type(self.model.decoder).forward)
            for counts in WARM_ROWS:
                self._read(counts)
        except Exception as error:
            self._failed(error)
            return
        finally:
            self._compiler = None
        self._codes[torch.get_num_threads()] = self._new
        log.info("compiled %s in %.0f s", self.model.name, time.perf_counter() - started)

    def _failed(self, error: Exception) -> None:
        self._codes.clear()
        self._after_s = float("inf")
        log.warning("passes run as they are: compiling them failed (%s)", in_one_line(error, 300))

    def _read(self, counts: tuple[int, ...]) -> Tensor:
        rows = [RowInput(slot, 0, [0] * count) for slot, count in enumerate(counts)]
        batch = FlatBatch.of(SlotCache(len(counts), WARM_LEN), rows, self.model.device)
        fed = None
        if self.model.state_input is not None:
            width = self.model.model.config.get_text_config().hidden_size
            fed = torch.zeros(sum(counts), width, dtype=self.model.dtype, device=self.model.device)
        return batch.view.hidden(self.model, batch.tokens, fed)


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return compiled code of a `forward`, for a single decoder that keeps its modules, hooks and packed weights.

    Before each call the code would check thousands of their attributes, which takes a tenth of a pass over one token.
    Only the other arguments and torch's global state are checked.
    """
    first, *others = inspect.signature(forward, follow_wrapped=False).parameters
    arguments = {*others, first} if first == "args" else set(others)

    def checked(guards: Sequence[Any]) -> list[bool]:
        return [not guard.name or _is_argument(guard.name, arguments) for guard in guards]

    return torch.compile(_copied(forward), fullgraph=True, dynamic=True, options={"guard_filter_fn": checked})


def _is_argument(name: str, arguments: Collection[str]) -> bool:
    """Return True if a guard is about one of the arguments and not about the decoder, which is the first."""
    name = name.removeprefix("L['")
    match = re.match(r"\w+", name)
    return match is not None and match[0] in arguments and not re.match(r"args(\'\])?\[0\]", name)


def _copied(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a copy of its code: compiled code is found by that, and must be one decoder's alone."""
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=function.__code__.co_name)
    copied = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
