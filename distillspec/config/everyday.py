"""Settings of each command that `--help` shows. `--help=all` shows every one."""

from __future__ import annotations

_TARGET = ("target.path", "target.dtype", "target.device")
_ENGINE = (
    "engine.max_slots",
    "engine.max_model_len",
    "engine.cache_gib",
    "engine.proposer",
    "engine.controller",
    "engine.speculation_length",
    "engine.tree",
    "engine.profile",
)
_PROMPTS = ("data.prompts", "data.num_prompts", "data.eval_prompts", "data.max_new_tokens", "data.cache")

EVERYDAY: dict[str, tuple[str, ...]] = {
    "init-draft": (
        *_TARGET,
        *("draft.kind", "draft.path", "draft.layers", "draft.select", "draft.vocabulary", "draft.hidden_size"),
        *("data.prompts", "data.cache", "seed"),
    ),
    "train": (
        *_TARGET,
        *("draft.kind", "draft.path", "draft.layers", "draft.vocabulary", "loss.name"),
        *_PROMPTS,
        *("data.max_minutes", "data.source"),
        *("train.max_minutes", "train.max_steps", "train.learning_rate", "train.batch_tokens"),
        *("sampling.temperature", "evaluation.measure_speedup", "tracker.kind", "launcher.kind"),
        *("launcher.num_processes", "seed", "resume"),
    ),
    "train-stop": (
        *("draft.path", *_TARGET, "stop.reads", "stop.text", "stop.answers", "stop.width", "stop.epochs"),
        *("sampling.temperature", "seed"),
    ),
    "eval": (
        *("drafts", *_TARGET, "data.prompts", "data.cache", "data.eval_prompts", "data.max_new_tokens"),
        *("sampling.temperature", "sampling.top_k", "sampling.top_p"),
        *("evaluation.speculation_length", "evaluation.measure_cost", "evaluation.measure_speedup", "seed"),
    ),
    "generate": (
        *(*_TARGET, "draft.path", *_PROMPTS, "data.max_minutes", "data.source", "data.temperature"),
        *("data.signal", "data.batch_slots", "data.generator", "seed", "resume"),
    ),
    "export": ("draft.path", "format", "dtype", "speculation_length", *_TARGET),
    "report": ("runs", "title"),
    "adapt": (
        *("online.folder", "once", "judge", "retrain_without", "max_updates", "loss.name", *_TARGET),
        *("adapt.every_requests", "adapt.min_requests", "adapt.learning_rate", "adapt.max_steps", "adapt.device"),
        *("adapt.threads", "adapt.offline", "adapt.offline_share", "tracker.kind"),
        *("gate.requests", "gate.min_requests", "seed"),
    ),
    "replay": ("action", "online.folder", "tenant"),
    "versions": ("action", "online.folder", "version", "name", "keep"),
    "bench": (
        *("bench.prompts", "bench.policies", "bench.rates", "bench.seconds", "bench.rounds", "bench.max_tokens"),
        *("url", "model", "key_env", *_TARGET, "draft.path", "drafts", *_ENGINE, "sampling.temperature", "seed"),
    ),
    "quality": (
        *("quality.prompts", "quality.verifications", "quality.count", "quality.max_tokens"),
        *(*_TARGET, "draft.path", "drafts", *_ENGINE, "sampling.temperature", "seed"),
    ),
    "profile": (*_TARGET, "draft.path", "profile.contexts", "profile.rows", "profile.lengths", "profile.rounds"),
    "simulate": (
        *("policies", "speculation_length", "tree"),
        *("workload.requests", "workload.rates", "workload.trace", "workload.alpha"),
        *("workload.prompt_tokens", "workload.output_tokens", "hardware.profile", "hardware.slots", "seed"),
    ),
    "serve": (
        *(*_TARGET, "draft.path", "drafts", *_ENGINE, "engine.selection"),
        *("server.host", "server.port", "server.api_key_file", "server.admin_key_file", "server.model_name"),
        *("server.max_queue", "server.drafts_folder", "server.log_format"),
        *("online.mode", "online.folder", "replay.share", "replay.retention_days", "replay.redaction", "loss.name"),
        *("adapt.every_requests", "gate.requests", "tracker.kind"),
    ),
}
