"""Parameters of SGLang's EAGLE-3 class and its rules for loading them, written out: SGLang itself needs a GPU.

Nothing of distillspec's is in here: names, shapes and rules are those of SGLang's `llama_eagle3.py`, by `config.json`.
It passes over names that it does not know without a word, so a draft with wrong ones would run on random weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

STACKED = {  # part of a name: the joint parameter's, and which of its parts
    ".q_proj": (".qkv_proj", 0),
    ".k_proj": (".qkv_proj", 1),
    ".v_proj": (".qkv_proj", 2),
    ".gate_proj": (".gate_up_proj", 0),
    ".up_proj": (".gate_up_proj", 1),
}
STATES = 3  # that the target hands over, side by side


class SglangEagle3:
    """The parameters that SGLang makes by a folder's configuration, and what its loader puts into them.

    Attributes:
        unknown: names in the folder that it would leave out.
        hot_token_id: `[draft_vocab_size]` the target's id of each row of the head.
    """

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.hot_token_id: Tensor | None = None
        self.unknown: list[str] = []
        self.parts = self._parts()
        self.filled: dict[str, list[Tensor | None]] = {
            name: [None] * len(rows) for name, (rows, _) in self.parts.items()
        }
        for name, weight in load_file(*folder.glob("*.safetensors")).items():
            self._load(name, weight)

    @property
    def lacking(self) -> list[str]:
        """Return the parameters of which a part is random still."""
        return [name for name, parts in self.filled.items() if any(part is None for part in parts)]

    @property
    def captured_states(self) -> list[int]:
        """Return the states that the target hands over: the numbers of layers before each."""
        return [layer + 1 for layer in self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]

    def _parts(self) -> dict[str, tuple[list[int], tuple[int, ...]]]:
        """Return rows of each part of each parameter, and the other dimensions."""
        config = self.config
        width, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        query, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
        layer = "model.midlayer."
        matrices = {
            "model.embed_tokens.weight": ([config["vocab_size"]], (width,)),
            "model.fc.weight": ([width], (STATES * config["target_hidden_size"],)),
            f"{layer}self_attn.qkv_proj.weight": ([query, kv, kv], (2 * width,)),
            f"{layer}self_attn.o_proj.weight": ([width], (query,)),
            f"{layer}mlp.gate_up_proj.weight": ([inner, inner], (width,)),
            f"{layer}mlp.down_proj.weight": ([width], (inner,)),
            "lm_head.weight": ([config["draft_vocab_size"]], (width,)),
        }
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        vectors = [f"{layer}{name}.weight" for name in norms] + ["model.norm.weight"]
        return matrices | {name: ([width], ()) for name in vectors}

    def _load(self, name: str, weight: Tensor) -> None:
        if "d2t" in name:
            self.hot_token_id = weight + torch.arange(weight.shape[0])
            return
        if "t2d" in name:
            return
        part = 0
        for own, (joint, number) in STACKED.items():
            if own in name:
                name, part = name.replace(own, joint), number
                break
        name = name if name in self.parts else f"model.{name}"
        if name not in self.parts:
            self.unknown.append(name)
            return
        rows, rest = self.parts[name]
        assert weight.shape == (rows[part], *rest), f"{name} has another shape"
        self.filled[name][part] = weight
