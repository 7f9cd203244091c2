"""Settings of earlier versions, and the line for users who still give them.

Some are fields of the dataclasses still: Python may set them, as tests do, the command line may not.
"""

from __future__ import annotations

from dataclasses import fields

from distillspec.config.engine import EngineConfig, SamplingEngineConfig
from distillspec.config.online import AdaptConfig, GateConfig, ReplayConfig

SAMPLING_ENGINE = ("train", "eval", "init-draft")  # commands with `SamplingEngineConfig`
LEARNING = ("serve", "adapt")  # commands that learn online
FIXED = {
    "gate.draft_cost": "the cost of a draft step is measured by the engine, or estimated from the models' sizes",
    "gate.verify_cost": "the cost of verification is measured by the engine, or taken as 0.05 of a target step a token",
    "gate.domain_requests": f"a verdict on a domain or tenant takes {GateConfig.domain_requests} conversations",
    "gate.offline_samples": "versions are judged by live answers alone",
    "gate.busy_share": "the trainer's process judges, from the log; the engine's time is not used",
    "gate.canary_requests": "a version is rolled back where answers since its promotion show it worse",
    "gate.max_domain_loss": "a version is refused if the whole interval of its gain on a domain or tenant is below 0",
    "replay.held_out": "every answer judges first and is learnt from afterwards; none is set aside",
    "replay.tail_samples": "the gate needs no draws from the tail; gate.evidence=target reads whole distributions",
    "adapt.idle_only": "adapt.busy_share=0 leaves the trainer a hundredth of the time beside requests",
    "adapt.anchor": "adapt.replay_share and adapt.offline keep a draft from forgetting",
    "adapt.lora_rank": "an update trains all weights; adapt.max_steps and adapt.batch_tokens bound its work",
    "adapt.lora_by": "an update trains all weights, and there are no adapters",
    "gate.window": f"the newest {GateConfig.window} requests of a version are compared",
    "gate.collapse": f"the alarm is raised at {GateConfig.collapse} of the long average",
    "adapt.drift_drop": f"a drift is a fall by {AdaptConfig.drift_drop}; adapt.on_drift=false ignores it",
    "adapt.clip_norm": f"gradients are clipped at norm {AdaptConfig.clip_norm}, as in training",
    "adapt.max_bad_steps": f"{AdaptConfig.max_bad_steps} steps with NaN or infinite values end an update",
    "adapt.max_bad_updates": f"{AdaptConfig.max_bad_updates} failed updates in a row stop the trainer",
    "replay.fresh_share": f"{ReplayConfig.fresh_share} of replay.max_mib is for the newest shards",
    "replay.shard_positions": f"a shard holds {ReplayConfig.shard_positions} tokens; replay.flush_s writes one earlier",
    "server.max_header_kib": "the request line and headers may take 16 KiB",
    "engine.max_wait_s": "give engine.controller_options={max_wait_s: 1} to engine.controller=smartspec",
    "engine.lookup_longest": "give engine.proposer_options={longest:4} to engine.proposer=prompt_lookup",
    "engine.lookup_shortest": "give engine.proposer_options={shortest:2} to engine.proposer=prompt_lookup",
    "loss.temperature": "the log holds the target's signal at temperature 1",
    "loss.select_fraction": "online updates choose tokens by adapt.positions",
    "loss.reference": "online updates choose tokens by adapt.positions",
}
"""Setting of the commands that learn online → what holds in its place, and thereby why nobody needs it."""
EVALUATING = {"evaluation.max_gamma": "evaluation.speculation_length"}
JUDGING = {"gate.max_gamma": "gate.speculation_length"}
RENAMED = {
    "train": EVALUATING,
    "eval": EVALUATING,
    "serve": JUDGING,
    "adapt": JUDGING,
    "export": {"gamma": "speculation_length"},
}
"""Command → setting of earlier versions → its name now."""
NOT_RANDOM = ("export", "report", "replay", "versions")
NOT_OF_SAMPLING = {"engine"} | {
    f"engine.{name}"
    for name in {field.name for field in fields(EngineConfig)} - {field.name for field in fields(SamplingEngineConfig)}
}


def present_name(command: str, key: str) -> str:
    """Return the name that a setting has now, which may be the one that it always had."""
    return RENAMED.get(command, {}).get(key, key)


def removed(command: str, key: str) -> str | None:
    """Return the line about a removed setting `key`, None for a key that was never one."""
    if command in SAMPLING_ENGINE and key in NOT_OF_SAMPLING:
        return (
            f"{key} is no longer a setting of distill {command}: the engine that samples there takes "
            "engine.max_slots and engine.speculation_length"
        )
    if command in LEARNING and key in FIXED:
        return f"{key} is no longer a setting of distill {command}: {FIXED[key]}"
    if (name := present_name(command, key)) != key:
        return f"{key} is called {name} now"
    if command in NOT_RANDOM and key == "seed":
        return f"seed is no longer a setting of distill {command}: nothing in it is random"
    return None
