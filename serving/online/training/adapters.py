"""LoRA adapters on a draft (Hu et al. 2021), merged into its weights after training."""

from __future__ import annotations

from typing import Any

from distillspec.models import LanguageModel


class Adapters:
    """Adapters of `rank` inside `draft`, which runs with them. They alone learn."""

    def __init__(self, draft: LanguageModel, rank: int) -> None:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
        # The base model's own layers are replaced in place, so that `draft.model` runs with the adapters.
        self._peft: Any = get_peft_model(draft.model, config)
        for name, parameter in self._peft.named_parameters():
            parameter.requires_grad_("lora_" in name)

    def merge(self) -> None:
        """Merge the adapters into the draft's weights."""
        self._peft.merge_and_unload()
