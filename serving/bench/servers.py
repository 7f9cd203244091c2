"""OpenAI-compatible servers under load: found and checked before anything is sent, with their own counters."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from typing import Any

import httpx

from distillspec.config.bench import base_url
from distillspec.errors import ConfigError

TIMEOUT_S = 30.0  # for the list of models and /metrics
# Counters of drafted and accepted tokens: vLLM's, and ours under the same names.
DRAFTED = re.compile(r"^(?:vllm|distillspec):spec_decode_num_draft_tokens_total(?:\{.*\})? (\S+)", re.MULTILINE)
ACCEPTED = re.compile(r"^(?:vllm|distillspec):spec_decode_num_accepted_tokens_total(?:\{.*\})? (\S+)", re.MULTILINE)
# SGLang has a gauge over its last steps.
LAST_RATE = re.compile(r"^sglang:spec_accept_rate(?:\{.*\})? (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Server:
    """Address, model and key of a server. The key is not in its repr."""

    url: str
    base: str
    model: str
    key: str = field(default="", repr=False)

    @property
    def name(self) -> str:
        """Name in tables."""
        return self.base.split("://", 1)[1].removesuffix("/v1")

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of an httpx client. Proxies of the environment are not used, for they would be measured too."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return {"headers": headers, "trust_env": False, "verify": ssl.create_default_context()}


@dataclass(frozen=True)
class SpeculationCounts:
    """Drafted and accepted tokens in /metrics, None where it does not report them."""

    drafted: float | None = None
    accepted: float | None = None
    last_rate: float | None = None

    def rate_since(self, before: SpeculationCounts) -> float | None:
        """Return accepted / drafted tokens since the earlier counts `before`, None if unknown."""
        if self.drafted is None or self.accepted is None or before.drafted is None or before.accepted is None:
            return self.last_rate
        drafted = self.drafted - before.drafted
        return (self.accepted - before.accepted) / drafted if drafted > 0 else None


def find_server(url: str, model: str | None, key: str, key_name: str) -> Server:
    """Ask a server for its models.

    Raises:
        ConfigError: it does not answer, refuses the key, is not OpenAI-compatible, or lacks the model.
    """
    nameless = Server(url, base_url(url), "", key)
    try:
        with httpx.Client(timeout=TIMEOUT_S, **nameless.settings) as client:
            reply = client.get(f"{nameless.base}/models")
    except httpx.TimeoutException as error:
        raise ConfigError(f"url={url}: no answer within {TIMEOUT_S:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError) as error:
        raise ConfigError(f"url={url}: cannot connect ({error}); is the server running?") from error
    if reply.status_code in (401, 403):
        problem = f"the key in {key_name} is refused" if key else f"it wants an API key; put it into {key_name}"
        raise ConfigError(f"url={url}: {problem} ({reply.status_code})")
    names = _model_names(reply)
    if not names:
        raise ConfigError(
            f"url={url}: {nameless.base}/models is no list of models (status {reply.status_code}); "
            "give the address of an OpenAI-compatible server"
        )
    if model is None and len(names) > 1:
        raise ConfigError(f"url={url}: it has several models ({', '.join(names)}); choose one with model=NAME")
    if model is not None and model not in names:
        raise ConfigError(f"url={url}: it has no model {model}; model= may be {', '.join(names)}")
    return Server(url, nameless.base, model or names[0], key)


def speculation_counts(server: Server) -> SpeculationCounts:
    """Read the server's /metrics. The counts are None where it has none."""
    try:
        with httpx.Client(timeout=TIMEOUT_S, **server.settings) as client:
            reply = client.get(server.base.removesuffix("/v1") + "/metrics")
    except httpx.HTTPError:
        return SpeculationCounts()
    return counts_in(reply.text) if reply.status_code == 200 else SpeculationCounts()


def counts_in(text: str) -> SpeculationCounts:
    """Parse Prometheus' text format: sums of counts over engines, the mean of rates."""
    drafted, accepted, rates = (
        [float(value) for value in pattern.findall(text)] for pattern in (DRAFTED, ACCEPTED, LAST_RATE)
    )
    return SpeculationCounts(
        sum(drafted) if drafted else None,
        sum(accepted) if accepted else None,
        sum(rates) / len(rates) if rates else None,
    )


def _model_names(reply: httpx.Response) -> list[str]:
    try:
        return [str(entry["id"]) for entry in reply.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return []
