"""Simulated machine: costs of passes, and the tokens that its caches hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from distillspec.config.simulation import HardwareConfig, ModelFigures
from distillspec.errors import ConfigError
from distillspec.serving.control.hardware_profile import Profile
from distillspec.serving.control.latency import ForwardCost, LatencyModel


@dataclass(frozen=True)
class Hardware:
    """Costs and limits of a simulated machine. Times are seconds."""

    latency: LatencyModel
    cache_tokens: int
    slots: int = 256
    max_len: int = 4096
    prefill_chunk: int = 2048
    noise: float = 0.0
    batch_expansion: bool = False
    title: str = ""


def derive_hardware(config: HardwareConfig) -> Hardware:
    """Derive costs and cache size from a machine's figures (both sides of a roofline added, as in SmartSpec's Eq. 7).

    A pass reads all weights once (`fixed`), each cached token once (`per_context`), and multiplies each token with each
    weight (`per_token`). The memory that the weights leave holds keys and values of target and draft.

    Raises:
        ConfigError: a model's figures are impossible, or the weights leave no room for a request.
    """
    latency = _latency(config)
    cache_tokens = config.cache_tokens or _cache_tokens(config)
    return Hardware(
        latency,
        cache_tokens,
        config.slots,
        config.max_len,
        config.prefill_chunk,
        config.noise,
        config.batch_expansion,
        config.title,
    )


def forward_cost(config: HardwareConfig, model: ModelFigures) -> ForwardCost:
    """Return a model's cost coefficients from its figures."""
    read, multiplied = config.bandwidth * config.bandwidth_share, config.flops * config.flops_share
    shared = model.params - model.experts * model.expert_params
    used = shared + model.active * model.expert_params
    return ForwardCost(
        per_context=model.kv_bytes / read,
        per_token=2 * used / multiplied,
        fixed=shared * model.bytes_per_param / read + model.overhead_s,
        per_expert=model.expert_params * model.bytes_per_param / read,
        experts=model.experts,
        active=model.active,
    )


def _latency(config: HardwareConfig) -> LatencyModel:
    if config.profile is not None:
        return Profile.read(Path(config.profile)).latency
    if config.target.params <= 0:
        raise ConfigError("hardware.target.params=0: choose a machine (hardware=a100-7b) or give hardware.profile")
    draft = forward_cost(config, config.draft) if config.draft.params else None
    return LatencyModel(forward_cost(config, config.target), draft, config.draft_free_s)


def _cache_tokens(config: HardwareConfig) -> int:
    models = (config.target, config.draft)
    weights = sum(model.params * model.bytes_per_param for model in models)
    token = sum(model.kv_bytes for model in models)
    room = config.memory * config.memory_share - weights
    if token <= 0:
        return config.slots * config.max_len
    if room < config.max_len * token:
        raise ConfigError(
            f"hardware.memory={config.memory:.3g}: beside {weights:.3g} bytes of weights not even one request of "
            f"hardware.max_len={config.max_len} tokens fits; give more memory or hardware.cache_tokens"
        )
    return int(room / token)
