"""Simulated machine: costs of passes, and the tokens that its caches hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from distillspec.config.simulation import HardwareConfig, ModelFigures
from distillspec.errors import ConfigError
from distillspec.serving.base.ladder import Ladder, Recorded
from distillspec.serving.costs.hardware_profile import NO_HOST, HostCost, Profile
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable

EXPERT_KNOTS = (*range(33), *range(36, 64, 4), *range(64, 128, 8), *range(128, 513, 32))


@dataclass(frozen=True)
class Hardware:
    """Costs and limits of a simulated machine. Times are seconds. `host`: what steps take outside their passes."""

    latency: LatencyModel
    cache_tokens: int
    slots: int = 256
    max_len: int = 4096
    prefill_chunk: int = 2048
    noise: float = 0.0
    batch_expansion: bool = False
    title: str = ""
    micro_batches: int = 1
    padded_attention: bool = False
    host: HostCost = NO_HOST


def derive_hardware(config: HardwareConfig) -> Hardware:
    """Derive costs and cache size from a machine's figures (both sides of a roofline added, as in SmartSpec's Eq. 7).

    A pass reads all weights once (`fixed`), each cached token once (`per_context`), and multiplies each token with each
    weight (`per_token`). The memory that the weights leave holds keys and values of target and draft.

    Raises:
        ConfigError: a model's figures are impossible, or the weights leave no room for a request.
    """
    profile = None if config.profile is None else Profile.read(Path(config.profile))
    latency = _latency(config) if profile is None else profile.latency
    cache_tokens = config.cache_tokens or _cache_tokens(config)
    return Hardware(
        latency,
        cache_tokens,
        config.slots,
        config.max_len,
        config.prefill_chunk,
        config.noise,
        config.batch_expansion,
        config.title if profile is None else profile.title,
        config.micro_batches,
        config.padded_attention,
        NO_HOST if profile is None else profile.host,
    )


def forward_cost(config: HardwareConfig, model: ModelFigures) -> CostTable:
    """Return a model's costs from its figures: a line, and in a mixture the experts that are read besides."""
    read = config.bandwidth * config.bandwidth_share  # bytes a second
    multiplied = config.flops * config.flops_share  # a second
    shared = model.params - model.experts * model.expert_params
    per_token = 2 * (shared + model.active * model.expert_params) / multiplied
    fixed = shared * model.bytes_per_param / read + model.overhead_s
    per_context = model.kv_bytes / read
    if not model.experts:
        return CostTable.line(per_context, per_token, fixed)
    per_expert = model.expert_params * model.bytes_per_param / read
    experts = [per_expert * loaded_experts(model.experts, model.active, tokens) for tokens in EXPERT_KNOTS]
    knots = zip(EXPERT_KNOTS, experts, strict=True)
    return CostTable.rising([(float(n), fixed + per_token * n + read_s) for n, read_s in knots], per_context)


def loaded_experts(experts: int, active: int, tokens: float) -> float:
    """Return the experts of a layer expected to be used by any of `tokens`: E · (1 − ((E − a) / E)^tokens)."""
    return experts * (1 - (1 - active / experts) ** tokens)


def _latency(config: HardwareConfig) -> LatencyModel:
    if config.target.params <= 0:
        raise ConfigError("hardware.target.params=0: choose a machine (hardware=a100-7b) or give hardware.profile")
    members = {name: forward_cost(config, draft) for name, draft in config.drafts.items()}
    draft = forward_cost(config, config.draft) if config.draft.params else next(iter(members.values()), None)
    target = forward_cost(config, config.target)
    latency = LatencyModel(target, draft, config.draft_free_s, config.draft_at_once, members)
    steps = Ladder.tokens(config.recorded_tokens)
    return latency.recorded_in(Recorded(steps, steps))


def _cache_tokens(config: HardwareConfig) -> int:
    models = (config.target, *(config.drafts.values() or [config.draft]))
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
