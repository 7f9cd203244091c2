"""LoRA adapters on a draft (Hu et al. 2021): few numbers learn, and are merged when they have learnt.

The engine serves one draft at a time, so an adapter cannot be chosen by request. With one a domain they learn apart,
none pulling against another, and what serves is W + Σ_d share_d · ΔW_d: every domain's change, diluted by its share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distillspec.models import LanguageModel

MERGED = "served"


class Adapters:
    """Adapters of `rank` inside `draft`, which runs with the one chosen last.

    Args:
        shares: domain → its part in the merged change; one entry is one adapter for everything.
    """

    def __init__(self, draft: LanguageModel, rank: int, shares: Mapping[str, float]) -> None:
        from peft import LoraConfig, get_peft_model

        self._names = {domain: f"a{place}" for place, domain in enumerate(shares)}
        self._shares = dict(shares)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
        first, *others = self._names.values()
        # The base model's own layers are replaced in place, so that `draft.model` runs with the adapters.
        self._peft: Any = get_peft_model(draft.model, config, adapter_name=first)
        for name in others:
            self._peft.add_adapter(name, config)
        for name, parameter in self._peft.named_parameters():
            parameter.requires_grad_("lora_" in name)  # of all adapters: an optimizer is made of what may learn

    def choose(self, domain: str) -> None:
        """Learn and run with this domain's from now on; with one adapter that is the one."""
        if len(self._names) > 1:
            self._peft.set_adapter(self._names[domain])

    def merge(self) -> None:
        """Leave a plain draft whose weights hold the change; several are merged exactly, by joining their ranks."""
        if len(self._names) > 1:
            names = list(self._names.values())
            self._peft.add_weighted_adapter(names, list(self._shares.values()), MERGED, combination_type="cat")
            self._peft.set_adapter(MERGED)
        self._peft.merge_and_unload()
