"""The engine as a `Generator` of training data: speculative sampling that records the teacher's signal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from distillspec.config.engine import EngineConfig
from distillspec.errors import ConfigError, RunError
from distillspec.models import LanguageModel
from distillspec.recording import SignalRecorder
from distillspec.serving.base.params import SEED_LIMIT, SamplingParams
from distillspec.serving.base.requests import CompletionOutput, Request, SequenceState
from distillspec.serving.base.transfer import to_device
from distillspec.serving.engine import Engine
from distillspec.serving.proposers.by_name import without_draft
from distillspec.serving.step.commit import Emission
from distillspec.signals import SignalRequest
from distillspec.types import GenerationRequest, Sample, SamplingPolicy


class EngineGenerator:
    """Continuous batching by an engine. Implements `distillspec.types.Generator`.

    The engine exists during one call of `generate`. Afterwards the models are as before, so a draft in training may
    write between two of its steps. Outputs depend on the requests' seeds alone.

    Args:
        writer: the model that writes.
        settings: of the engine. Without a draft, a proposer that needs one is replaced by prompt lookup or none.
        source: mark of the samples: teacher, draft or mixed.
        draft: speculates, to write faster.
    """

    def __init__(
        self,
        writer: LanguageModel,
        settings: EngineConfig,
        *,
        source: str = "teacher",
        draft: LanguageModel | None = None,
    ) -> None:
        self.writer, self.settings, self.source = writer, settings, source
        self.draft = draft if settings.speculation_length else None

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        policy: SamplingPolicy,
        *,
        stop_ids: Sequence[int],
        signal: SignalRequest | None = None,
        on_tokens: Callable[[int], None] | None = None,
        deadline: float | None = None,
    ) -> Iterator[tuple[int, Sample]]:
        """See `distillspec.types.Generator.generate`."""
        if not requests:
            return
        engine = self._engine(requests)
        recording = _Recording(signal, requests)
        if signal is not None:
            engine.observer = recording
        try:
            for index, request in enumerate(requests):
                engine.submit(_request(index, request, policy, stop_ids))
            while engine.has_work:
                output = engine.step()
                if on_tokens is not None:
                    on_tokens(sum(len(delta.token_ids) for delta in output.deltas))
                for finished in output.finished:
                    index, completion = int(finished.request_id), finished.completions[0]
                    if completion.token_ids or completion.error:
                        yield index, self._sample(requests[index], completion, recording.of(index))
                if deadline is not None and time.monotonic() >= deadline:
                    _abort_all(engine, len(requests))
                    deadline = None
        finally:
            engine.close()

    def _engine(self, requests: Sequence[GenerationRequest]) -> Engine:
        settings = self.settings
        longest = max(len(request.prompt.token_ids) + request.max_new_tokens for request in requests)
        if settings.max_model_len is not None and settings.max_model_len < longest:
            raise ConfigError(
                f"max_model_len={settings.max_model_len}: prompts and answers take up to {longest} tokens"
            )
        proposer = settings.proposer if self.draft is not None else without_draft(settings)
        slots = min(settings.max_slots, len(requests))
        return Engine(
            self.writer, self.draft, replace(settings, max_slots=slots, max_model_len=longest, proposer=proposer)
        )

    def _sample(
        self, request: GenerationRequest, completion: CompletionOutput, recorder: SignalRecorder | None
    ) -> Sample:
        if completion.error is not None:
            raise RunError(f"{self.writer.name} cannot write on for prompt {request.prompt.id}: {completion.error}")
        prompt = request.prompt
        return Sample(
            prompt_id=prompt.id,
            domain=prompt.domain,
            prompt_ids=prompt.token_ids,
            response_ids=completion.token_ids,
            signal=recorder.finish() if recorder is not None else None,
            source=self.source,
            finished=completion.finish_reason == "stop",
        )


class _Recording:
    """Observer with one signal recorder a request."""

    def __init__(self, signal: SignalRequest | None, requests: Sequence[GenerationRequest]) -> None:
        self.signal = signal
        self.requests = requests
        self._recorders: dict[int, SignalRecorder] = {}

    def __call__(self, emissions: Sequence[Emission], logits: Tensor) -> None:
        recorders = [self._recorder(emission.sequence) for emission in emissions for _ in emission.rows]
        rows = [row for emission in emissions for row in emission.rows]
        SignalRecorder.record(logits[to_device(rows, logits.device)].float(), recorders)

    def _recorder(self, sequence: SequenceState) -> SignalRecorder:
        assert self.signal is not None
        index = int(sequence.request.id)
        if index not in self._recorders:
            self._recorders[index] = SignalRecorder(self.signal, self.requests[index].seed)
        return self._recorders[index]

    def of(self, index: int) -> SignalRecorder | None:
        """Return a finished request's recorder and drop it, None if none recorded."""
        return self._recorders.pop(index, None)


def _request(index: int, request: GenerationRequest, policy: SamplingPolicy, stop_ids: Sequence[int]) -> Request:
    if not request.prompt.token_ids:
        raise ConfigError("an empty prompt cannot be answered; give at least one token")
    params = SamplingParams(
        temperature=policy.temperature,
        top_k=policy.top_k,
        top_p=policy.top_p,
        min_p=policy.min_p,
        max_tokens=request.max_new_tokens,
        seed=request.seed % SEED_LIMIT,
        ignore_eos=True,
        stop_token_ids=tuple(stop_ids),
    )
    return Request(str(index), request.prompt.token_ids, params)


def _abort_all(engine: Engine, count: int) -> None:
    for index in range(count):
        engine.abort(str(index))
