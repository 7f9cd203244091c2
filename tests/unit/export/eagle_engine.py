"""EAGLE-3's arithmetic as other engines run it, written out in plain torch over an exported folder.

Nothing of distillspec's is in here: names, settings and the order of norms and residuals are those of vLLM's
`llama_eagle3.py`. SGLang's and speculators' first layers compute the same.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu

DTYPE = torch.float64


class EagleEngine:
    """One draft, by what its folder says. `table [V, D]` are the target's input embeddings."""

    def __init__(self, folder: Path, table: Tensor) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.layer = config.get("transformer_layer_config", config)
        self.config = config
        weights = load_file(folder / "model.safetensors")
        self.d2t, self.t2d = weights.pop("d2t", None), weights.pop("t2d", None)
        self.table = weights.pop("embed_tokens.weight", table).to(DTYPE)
        self.weights = {name.replace("midlayer.", "layers.0."): value.to(DTYPE) for name, value in weights.items()}
        assert config["norm_before_residual"] is False
        assert not {"norm_before_fc", "fc_norm", "norm_output"} & config.keys()

    @property
    def state_ids(self) -> list[int]:
        """Hidden states that the target hands over: the number of layers before each."""
        if "eagle_config" in self.config:  # SGLang names the layer whose output it is
            return [layer + 1 for layer in self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
        return self.config["eagle_aux_hidden_state_layer_ids"]

    def combine(self, states: Tensor) -> Tensor:
        """Return the fused states `[L, D]` of `[L, m · F]`."""
        assert states.shape[-1] == len(self.state_ids) * self.config["target_hidden_size"]
        assert self.layer.get("num_aux_hidden_states", 3) == len(self.state_ids)
        return states @ self.weights["fc.weight"].T

    def forward(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits over the target's vocabulary `[L, V]`, and the states `[L, D]` that the next step reads."""
        embeddings = self.table[tokens]
        places = torch.arange(len(tokens), dtype=DTYPE)
        hidden, residual = states, None
        for number in range(self.layer["num_hidden_layers"]):
            name = f"layers.{number}."
            if residual is None:
                residual = states
                read = self._norm(embeddings, name + "input_layernorm"), self._norm(states, name + "hidden_norm")
                hidden = torch.cat(read, -1)
            else:
                residual = hidden + residual
                hidden = self._norm(residual, name + "input_layernorm")
            residual = residual + self._attention(hidden, places, name + "self_attn.")
            hidden = self._mlp(self._norm(residual, name + "post_attention_layernorm"), name + "mlp.")
        residual = hidden + residual
        return self._target_wide(self._norm(residual, "norm") @ self.weights["lm_head.weight"].T), residual

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        single = hidden.float()  # transformers and engines compute the norm itself in float32
        single = single * (single.pow(2).mean(-1, keepdim=True) + self.layer["rms_norm_eps"]).rsqrt()
        return single.to(DTYPE) * self.weights[f"{name}.weight"]

    def _attention(self, hidden: Tensor, places: Tensor, name: str) -> Tensor:
        heads, kv = self.layer["num_attention_heads"], self.layer["num_key_value_heads"]
        query, key, value = (
            (hidden @ self.weights[f"{name}{part}_proj.weight"].T).view(len(hidden), count, -1).transpose(0, 1)
            for part, count in (("q", heads), ("k", kv), ("v", kv))
        )
        key, value = (each.repeat_interleave(heads // kv, 0) for each in (self._turned(key, places), value))
        scores = self._turned(query, places) @ key.transpose(1, 2) / self.layer["head_dim"] ** 0.5
        seen = torch.ones(len(hidden), len(hidden), dtype=torch.bool).tril()
        read = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value
        return read.transpose(0, 1).reshape(len(hidden), -1) @ self.weights[f"{name}o_proj.weight"].T

    def _turned(self, heads: Tensor, places: Tensor) -> Tensor:
        width = self.layer["head_dim"]
        # transformers computes these frequencies in float32, whatever the dtype of the model.
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        angles = places.float()[:, None] * (1.0 / self.layer["rope_theta"] ** exponents)
        cosine, sine = (torch.cat([each, each], -1).to(DTYPE) for each in (angles.cos(), angles.sin()))
        first, second = heads.chunk(2, -1)
        return heads * cosine + torch.cat([-second, first], -1) * sine

    def _mlp(self, hidden: Tensor, name: str) -> Tensor:
        gate, up, down = (self.weights[f"{name}{part}_proj.weight"] for part in ("gate", "up", "down"))
        return (silu(hidden @ gate.T) * (hidden @ up.T)) @ down.T

    def _target_wide(self, logits: Tensor) -> Tensor:
        if self.d2t is None:
            assert logits.shape[-1] == self.layer["vocab_size"]
            return logits
        ids = torch.arange(self.config["draft_vocab_size"]) + self.d2t
        return logits.new_full((len(logits), self.layer["vocab_size"]), -torch.inf).index_copy(1, ids, logits)
