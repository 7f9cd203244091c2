"""LoRA adapters on a draft (Hu et al. 2021), merged into its weights after training.

The engine serves one draft at a time, so an adapter cannot be chosen by request. With one adapter a domain, domains
train without opposing updates. The served weights are W + Σ_d share_d · ΔW_d.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distillspec.models import LanguageModel

MERGED = "served"


class Adapters:
    """Adapters of `rank` inside `draft`, which runs with the one chosen last.

    Args:
        shares: domain → its share of the merged change. A single entry makes one adapter for all domains.
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
            parameter.requires_grad_("lora_" in name)  # in all adapters: the optimizer takes what requires grad

    def choose(self, domain: str) -> None:
        """Train and run with this domain's adapter from now on. With a single adapter nothing changes."""
        if len(self._names) > 1:
            self._peft.set_adapter(self._names[domain])

    def merge(self) -> None:
        """Merge the adapters into the draft's weights. Several are merged exactly, by joining their ranks."""
        if len(self._names) > 1:
            names = list(self._names.values())
            self._peft.add_weighted_adapter(names, list(self._shares.values()), MERGED, combination_type="cat")
            self._peft.set_adapter(MERGED)
        self._peft.merge_and_unload()
