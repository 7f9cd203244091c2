"""`Engine`: target and draft in one process, continuous batching, exact speculation."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from distillspec.config import TargetConfig
from distillspec.errors import ConfigError, RunError
from distillspec.models import LanguageModel, load_target, read_metadata
from distillspec.models.checkpoint import draft_folder
from distillspec.models.draft import load_pretrained
from distillspec.models.memory import return_freed_memory
from distillspec.models.slot_cache import hook, unhook
from distillspec.serving.attention import choose_attention
from distillspec.serving.control.base import LengthController
from distillspec.serving.control.fixed import FixedLength
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.control.latency import LatencyModel, guessed
from distillspec.serving.control.profile import Profile, experts_of
from distillspec.serving.control.smartspec import SmartSpecController
from distillspec.serving.core import EngineCore, StepOutput
from distillspec.serving.graphs import CompiledRecorder, CudaRecorder, Recorder
from distillspec.serving.kv_cache import SlotPool
from distillspec.serving.memory import check_draft_fits, check_reads, choose_model_len, choose_slots
from distillspec.serving.packed_linear import PackedLinears, padded, row_counts
from distillspec.serving.params import SamplingParams
from distillspec.serving.proposers.base import Proposer
from distillspec.serving.proposers.draft_model import ConfidenceThreshold, DraftModel
from distillspec.serving.proposers.lookup_else_model import LookupElseModel
from distillspec.serving.proposers.prompt_lookup import PromptLookup
from distillspec.serving.requests import Request, RequestOutput
from distillspec.serving.runner import ModelRunner
from distillspec.serving.sampling import TokenSampler
from distillspec.serving.servable import check_servable
from distillspec.serving.settings import EngineSettings

log = logging.getLogger(__name__)

DRAFTING = ("draft_model", "lookup_else_model")  # proposers that need a draft
COMPILE_AFTER_S = 30.0  # about what compiling a shape costs, so that it is never paid in vain by much


@dataclass(frozen=True)
class _Held:
    """A model in use, and how it was before."""

    model: LanguageModel
    was_training: bool
    packs: PackedLinears | None


class Engine:
    """Serves one target, with a draft if there is one.

        engine = Engine.from_pretrained("smollm2", draft="runs/my-draft")
        outputs = engine.generate(["Why is the sky blue?"], SamplingParams(max_tokens=64))

    `generate` answers a list and returns. For a server: `submit` and `abort` from any thread, `step` in a loop on one.
    The models belong to the engine until `close`.
    """

    def __init__(
        self,
        target: LanguageModel,
        draft: LanguageModel | None = None,
        settings: EngineSettings | None = None,
        *,
        controller: LengthController | None = None,
        proposer: Proposer | None = None,
        recorder: Recorder | None = None,
        sampler: TokenSampler | None = None,
    ) -> None:
        self.settings = settings or EngineSettings()
        self.target, self.draft = target, draft
        models = [target] if draft is None else [target, draft]
        if self._proposer_name(with_draft=draft is not None) in DRAFTING and draft is None:
            raise ConfigError(f"proposer={self.settings.proposer} needs a draft; give draft=..., or use prompt_lookup")
        self.max_model_len = choose_model_len(self.settings, models)
        self.slots = choose_slots(self.settings, models, self.max_model_len)
        for model in models:
            check_servable(model, self.max_model_len)
        self._held: list[_Held] = []
        # Before models are held, for these may refuse: a profile of another machine, a kernel that does not run.
        controller = controller or self._make_controller()
        self._attend, attention = choose_attention(self.settings.attention, models)
        self._row_counts = row_counts(self.slots, controller.longest)
        for model in models:
            self._hold(model)
        self._recorder = recorder or self._choose_recorder()
        self.sampler = sampler or TokenSampler(target.identity.vocab_size, target.device, self.settings.seed)
        self.core = EngineCore(
            target,
            ModelRunner(target, self.slots, self.max_model_len, self._packs_of(target), self._recorder, self._attend),
            SlotPool(self.slots, self.max_model_len, self.settings.max_cache_tokens),
            self.sampler,
            controller,
            proposer or self._make_proposer(draft, _version(draft)),
            prefill_chunk=self.settings.prefill_chunk,
            prefix_reuse=self.settings.prefix_reuse,
        )
        self._ids = count()
        log.info(
            "engine: %s on %s in %s, %d slots of %d tokens, %s",
            target.name,
            target.device,
            str(target.dtype).removeprefix("torch."),
            self.slots,
            self.max_model_len,
            self._passes(attention),
        )

    @classmethod
    def from_pretrained(
        cls,
        target: str,
        draft: str | Path | None = None,
        *,
        dtype: str = "auto",
        device: str = "auto",
        **settings: Any,
    ) -> Engine:
        """Load models and build an engine.

        Args:
            target: `smollm2`, `tiny`, a Hub id, a folder or a .gguf file.
            draft: a distillspec draft folder, or any causal language model with the target's tokenizer.
            dtype: auto (bfloat16 where the hardware multiplies it, else float32), float32, bfloat16, float16, float64.
            device: auto, cpu, cuda, cuda:1, …
            settings: see `EngineSettings`.

        Raises:
            ConfigError: a setting, a model or their combination is impossible; the line names it.
        """
        known = EngineSettings.__dataclass_fields__
        unknown = [name for name in settings if name not in known]
        if unknown:
            raise ConfigError(f"{unknown[0]} is not an engine setting; there are {', '.join(known)}")
        chosen = EngineSettings(**settings)
        model = load_target(TargetConfig(path=target, dtype=dtype, device=device))
        if draft is None:
            return cls(model, None, chosen)
        check_target(draft, model)
        return cls(model, _load_draft(draft, model), chosen)

    def generate(
        self,
        prompts: Seq[str | Seq[int]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer all prompts (raw text or token ids), in order.

        Args:
            params: one for all, or one each.
            progress: show a bar with tokens a second.

        Raises:
            RequestRefused: a prompt that could never run; nothing is answered then.
            ConfigError: as many params as prompts are wanted.
        """
        chosen = list(params) if isinstance(params, Seq) else [params or SamplingParams()] * len(prompts)
        if len(chosen) != len(prompts):
            raise ConfigError(f"{len(prompts)} prompts but {len(chosen)} sampling parameters; give one, or one each")
        requests = [
            Request(f"generate-{next(self._ids)}", self.encode(prompt), own)
            for prompt, own in zip(prompts, chosen, strict=True)
        ]
        for request in requests:
            self.core.check(request)
        try:
            for request in requests:
                self.submit(request)
            done = self._run_until_done({request.id for request in requests}, progress)
        except BaseException:
            for request in requests:
                self.abort(request.id)
            raise
        return [done[request.id] for request in requests]

    def encode(self, prompt: str | Seq[int]) -> tuple[int, ...]:
        """Token ids of raw text; ids stay as they are.

        Raises:
            ConfigError: text, and the target has no tokenizer.
        """
        ids = self.target.text_tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        return tuple(int(i) for i in ids)

    def submit(self, request: Request) -> None:
        """See `EngineCore.submit`; returns at once, from any thread."""
        self._check_open()
        self.core.submit(request)

    def abort(self, request_id: str) -> None:
        """See `EngineCore.abort`; returns at once, from any thread."""
        self.core.abort(request_id)

    def step(self) -> StepOutput:
        """Advance every running request once; see `EngineCore.step`."""
        self._check_open()
        return self.core.step()

    @property
    def has_work(self) -> bool:
        return self.core.has_work

    def load_draft(self, path: str | Path) -> str:
        """Draft with another draft from the next step on, while requests run; returns its version.

        Everything is loaded and checked first, in the caller's thread: files, tokenizer, the target it was made for,
        weights that are numbers, room for its cache (its weights lie beside the old ones' until the switch). Outputs
        keep their distribution (seeded and greedy ones do not change at all).

        Raises:
            ConfigError: the draft is refused, the old one stays.
        """
        self._check_open()
        if self._proposer_name(with_draft=True) not in DRAFTING:
            raise ConfigError(f"proposer={self.settings.proposer} uses no draft; {path} is not loaded")
        draft = _load_draft(path, self.target)
        check_target(path, self.target)
        _check_finite(draft)
        check_reads(draft, self.max_model_len)
        check_servable(draft, self.max_model_len)
        check_draft_fits(self.settings, self.target, self.draft, draft, self.slots, self.max_model_len)
        self._hold(draft)
        version = _version(draft)
        proposer = self._make_proposer(draft, version)
        self.core.at_next_step(lambda: self._switch(draft, proposer))
        return version

    def use_controller(self, controller: LengthController) -> None:
        """See `EngineCore.use_controller`; call between steps, from the thread that steps."""
        self.core.use_controller(controller)

    def forget_prompts(self) -> None:
        """Drop the beginnings that idle slots remember, between steps: the next prompts are read whole."""
        pool = self.core.roster.pool
        for slot in range(len(pool.owners), pool.slots):
            pool.forget(slot)

    def guessed_costs(self, longest: int) -> LatencyModel:
        """What steps that draft up to `longest` tokens a row may cost, before any was measured."""
        counts = row_counts(self.slots, longest) if self._packs(self.target) else ()
        return guessed(experts_of(self.target), padded(counts))

    def explain_last_plan(self) -> Any:
        """Why the last step's lengths were what they were: the controller's own `Decision`; None before any step, and
        where the controller has no reasons."""
        return None if self.core.last_result is None else self.core.last_result.plan.why

    def check_integrity(self) -> None:
        """Raise AssertionError where slots, sequences and caches disagree."""
        self.core.roster.check_integrity()

    def close(self) -> None:
        """Give the models back as they were, and the memory of caches and packed weights; more calls do nothing."""
        for held in list(self._held):
            self._let_go(held.model)
        self.core.release()
        return_freed_memory()

    def _check_open(self) -> None:
        if not self._held:
            raise RunError("this engine is closed, and its models are given back; make another")

    def _hold(self, model: LanguageModel) -> None:
        """Take a model over: slot attention, packed weights, no dropout."""
        packs = PackedLinears(model, self._row_counts) if self._packs(model) else None
        self._held.append(_Held(model, model.model.training, packs))
        model.model.eval()
        hook(model.model)
        if packs is not None:
            packs.attach()

    def _let_go(self, model: LanguageModel) -> None:
        held = next(held for held in self._held if held.model is model)
        self._held.remove(held)
        if held.packs is not None:
            held.packs.detach()
        unhook(model.model)
        model.model.train(held.was_training)

    def _choose_recorder(self) -> Recorder | None:
        settings = self.settings
        if self.target.device.type == "cuda":
            return CudaRecorder() if settings.cuda_graphs else None
        if self.target.device.type != "cpu" or settings.compile is False or not CompiledRecorder.works():
            return None
        return CompiledRecorder(after_s=0.0 if settings.compile is True else COMPILE_AFTER_S)

    def _packs(self, model: LanguageModel) -> bool:
        return self.settings.pack_weights and PackedLinears.helps(model)

    def _passes(self, attention: str) -> str:
        """How forward passes run, in words."""
        packs = self._packs_of(self.target)
        words = [f"attention by {attention}"]
        if packs is not None and packs.row_counts:
            words.append(f"weights packed for {packs.row_counts} rows")
        if self._recorder is not None:
            words.append("graphs" if self._recorder.pads else "hot shapes compiled")
        else:
            words.append("passes run as they are")
        return ", ".join(words)

    def _packs_of(self, model: LanguageModel) -> PackedLinears | None:
        return next(held.packs for held in self._held if held.model is model)

    def _run_until_done(self, wanted: set[str], progress: bool) -> dict[str, RequestOutput]:
        done: dict[str, RequestOutput] = {}
        with tqdm(total=len(wanted), disable=not progress, unit="request") as bar:
            tokens = 0
            while len(done) < len(wanted):
                output = self.step()
                tokens += sum(len(delta.token_ids) for delta in output.deltas)
                new = {o.request_id: o for o in output.finished if o.request_id in wanted}
                done.update(new)
                bar.update(len(new))
                if progress:
                    bar.set_postfix_str(f"{tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tokens/s", refresh=False)
        return done

    def _make_controller(self) -> LengthController:
        longest = self.settings.speculation_length
        if self.settings.controller == "fixed":
            return FixedLength(longest)
        with_model = self._proposer_name(with_draft=True) in DRAFTING  # one may be loaded later
        latency = None
        if self.settings.profile is not None:
            draft = self.draft if with_model else None
            latency = Profile.load(Path(self.settings.profile), self.target, draft, self.settings).latency
        if self.settings.controller == "smartspec":
            assert latency is not None, "settings asked for a profile"
            latency = latency if with_model else replace(latency, draft=None)
            gated = latency.draft is not None and self.settings.draft_confidence > 0
            return SmartSpecController(longest, latency, gated=gated, max_wait_s=self.settings.max_wait_s)
        return GoodputController(
            longest,
            latency,
            lengths=self.settings.lengths,
            drafts_with_model=with_model,
            max_time_per_token_s=self.settings.max_time_per_token_s,
            guess=self.guessed_costs(longest),
        )

    def _make_proposer(self, draft: LanguageModel | None, version: str) -> Proposer | None:
        name = self._proposer_name(with_draft=draft is not None)
        lookup = PromptLookup(self.settings.lookup_longest, self.settings.lookup_shortest)
        if name == "none":
            return None
        if name == "prompt_lookup":
            return lookup
        assert draft is not None
        threshold = self.settings.draft_confidence
        rule = ConfidenceThreshold(threshold) if threshold > 0 else None
        model = DraftModel(
            draft,
            self.sampler,
            self.slots,
            self.max_model_len,
            version=version,
            rule=rule,
            packs=self._packs_of(draft),
            recorder=self._recorder,
            attend=self._attend,
        )
        return LookupElseModel(lookup, model) if name == "lookup_else_model" else model

    def _proposer_name(self, with_draft: bool) -> str:
        return self.settings.proposer or ("draft_model" if with_draft else "none")

    def _switch(self, draft: LanguageModel, proposer: Proposer | None) -> None:
        old, self.draft = self.draft, draft
        self.core.replace_proposer(proposer)
        if old is not None:
            self._let_go(old)
            return_freed_memory()


def _load_draft(path: str | Path, target: LanguageModel) -> LanguageModel:
    return load_pretrained(str(path), target, target.dtype)


def _version(draft: LanguageModel | None) -> str:
    return "" if draft is None else draft.identity.version


def check_target(path: str | Path, target: LanguageModel) -> None:
    """Refuse a draft that records another target than this.

    Raises:
        ConfigError: it was made for other weights.
    """
    if (folder := draft_folder(path)) is None:
        return  # any other model: nothing is recorded
    made_for = read_metadata(folder).get("target", {})
    recorded = made_for.get("weights_hash")
    if recorded and recorded != target.identity.weights_hash:
        raise ConfigError(
            f"the draft {path} was made for {made_for.get('name')}, whose weights differ from {target.name}'s"
        )


def _check_finite(draft: LanguageModel) -> None:
    for name, parameter in draft.model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise ConfigError(f"the draft {draft.name} has weights that are no numbers ({name}); the old draft stays")
