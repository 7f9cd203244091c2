"""A model prepared for passes over slots, and given back as it was."""

from __future__ import annotations

from collections.abc import Sequence

from distillspec.models import LanguageModel
from distillspec.models.draft_steps import DraftSteps
from distillspec.models.features import FeatureTap
from distillspec.models.fused_layers import FusedLayers
from distillspec.models.native_layers import NativeLayers
from distillspec.models.packed_linear import PackedLinears
from distillspec.models.slot_attention import hook, unhook
from distillspec.native.library import cpp_compiler
from distillspec.serving.execution.compiled_decoder import CompiledDecoder

COMPILE_AFTER_S = 30.0  # about the cost of compiling: models that never compute for so long are not worth it


class PreparedModel:
    """A model with slot attention, no dropout, and packed weights and a compiled decoder where they help.

    Args:
        model: changed until `restore`.
        pack_weights: False leaves all weights as they are.
        compile: True before the first pass, auto once it has computed for a while, False never. See `may_compile`.
        feature_ids: states that passes hand out (`FeatureTap`).
        exact: False lets packing round the weights (`PackedLinears`, `NativeLayers`, `DraftSteps`): a draft's.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        pack_weights: bool,
        compile: bool | str,
        feature_ids: Sequence[int] = (),
        exact: bool = True,
    ) -> None:
        self.model = model
        self._was_training = model.model.training
        self.packs = PackedLinears(model, exact=exact) if pack_weights and PackedLinears.helps(model) else None
        model.model.eval()
        # Reads weights before they are packed.
        self.native = NativeLayers.of(model, exact=exact, eight=not exact) if pack_weights else None
        self.steps = DraftSteps.of(model, self.native, eight=True) if pack_weights and not exact else None
        self.fused = FusedLayers(model) if may_fuse(model, compile) else None
        hook(model.model)
        if self.packs is not None:
            self.packs.attach()
        self._compile = compile
        self._tap: FeatureTap | None = None
        self.compiled: CompiledDecoder | None = None
        self.hand_out(feature_ids)

    def hand_out(self, feature_ids: Sequence[int]) -> None:
        """Let passes hand out these states and no others. Compiling begins anew, for code holds what it hands out."""
        if self._tap is not None:
            self._tap.detach()
        self._tap = FeatureTap(self.model, feature_ids) if feature_ids else None
        if self.compiled is not None:
            self.compiled.detach()
            self.compiled = None
        if may_compile(self.model, self._compile):
            self.compiled = CompiledDecoder(self.model, after_s=COMPILE_AFTER_S, wait=self._compile is True)

    def restore(self) -> None:
        """Undo the preparation."""
        self.native = self.steps = self.fused = None
        if self.compiled is not None:
            self.compiled.detach()
        if self.packs is not None:
            self.packs.detach()
        if self._tap is not None:
            self._tap.detach()
        unhook(self.model.model)
        self.model.model.train(self._was_training)


def may_fuse(model: LanguageModel, compile: bool | str) -> bool:
    """Return True if a model's layers may run in few launches (`FusedLayers`): on CUDA, where they are not compiled."""
    return model.device.type == "cuda" and compile is not True and FusedLayers.fit(model)


def may_compile(model: LanguageModel, choice: bool | str) -> bool:
    """Return True if a model's passes are compiled under a choice of `engine.compile`.

    One layer takes less time than the checks before compiled code. Accelerators compile only where they are told to:
    no machine has measured yet what that gains there.
    """
    if choice is False or not model.attends or len(model.layers) < 2:
        return False
    return cpp_compiler() is not None if model.device.type == "cpu" else choice is True
