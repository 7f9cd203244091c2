"""Settings of `distill bench`: a load on an engine or on servers, to compare policies or servers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from distillspec.config.checks import check_seed, list_of, require
from distillspec.config.engine import EngineConfig, check_named_drafts
from distillspec.config.evaluation import SamplingConfig
from distillspec.config.models import ServedDraftConfig, TargetConfig, check_drafts
from distillspec.config.pool import with_members


@dataclass
class BenchConfig:
    """Poisson arrivals, the same for every policy or server."""

    prompts: list[str] = field(default_factory=list)  # files with a column `prompt` (and `domain`), in turns
    policies: list[str] = field(default_factory=lambda: ["none", "fixed-2", "fixed-4", "goodput"])  # of the engine
    selections: list[str] = field(default_factory=list)  # of several drafts, by policy; or a draft's name, or joined
    rates: list[float] = field(default_factory=lambda: [0.5])  # requests a second
    seconds: float = 30.0  # of arrivals, for each policy or server, rate and round
    rounds: int = 1  # policies or servers take turns
    max_tokens: int = 64  # an answer
    ignore_eos: bool = False  # every answer as long as max_tokens
    longest_prompt: int = 512  # tokens; the engine leaves longer prompts out, servers get all
    timeout_s: float = 600.0  # url=: an answer that takes longer has failed

    def __post_init__(self) -> None:
        list_of("bench.prompts", self.prompts, (str,), "files")
        list_of("bench.policies", self.policies, (str,), "policies")
        require(bool(self.policies), "name the policies to compare: bench.policies=[none,fixed-2,goodput]")
        require(len(set(self.policies)) == len(self.policies), f"bench.policies={self.policies} names one twice")
        list_of("bench.selections", self.selections, (str,), "selections")
        list_of("bench.rates", self.rates, (int, float), "requests a second")
        require(
            bool(self.rates) and all(0 < rate < math.inf for rate in self.rates),
            f"bench.rates={self.rates} must name rates above 0, in requests a second",
        )
        for key in ("seconds", "timeout_s"):
            require(0 < getattr(self, key) < math.inf, f"bench.{key}={getattr(self, key)} must be above 0")
        for key in ("rounds", "max_tokens", "longest_prompt"):
            require(getattr(self, key) >= 1, f"bench.{key}={getattr(self, key)} must be at least 1")


@dataclass
class BenchCommand:
    """`distill bench`: a Poisson load on the engine under several policies, or on OpenAI-compatible servers (url=)."""

    target: TargetConfig = field(default_factory=TargetConfig)
    draft: ServedDraftConfig = field(default_factory=ServedDraftConfig)
    drafts: list[str] = field(default_factory=list)  # several, in place of draft.path
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    url: Any = None  # servers in place of the engine, ours, vLLM or SGLang: http://HOST:PORT, or a list
    model: str | None = None  # url=: the model's name; null: the one that each server has
    key_env: list[str] = field(default_factory=lambda: ["OPENAI_API_KEY"])  # variables with keys: one, or one a server
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_drafts(self.draft, self.drafts)
        self.drafts, self.engine = with_members(self.drafts, self.engine)
        if not self.drafts:
            check_named_drafts(self.engine, ())
        require(
            bool(self.drafts or self.urls) or not self.bench.selections,
            f"bench.selections={self.bench.selections} choose among several drafts; name them in drafts=[A,B]",
        )
        require(bool(self.bench.prompts), "name the prompts to send: bench.prompts=[FILE,FILE]")
        for url in self.urls:
            _check_url(url)
        require(bool(self.urls) or self.model is None, f"model={self.model} is for url=; the engine has target=")
        bases = [base_url(url) for url in self.urls]
        twice = [url for place, url in enumerate(bases) if url in bases[:place]]
        require(not twice, f"url={','.join(self.urls)} names {', '.join(twice)} twice")
        require(
            len(self.key_env) in (1, max(1, len(self.urls))),
            f"key_env={self.key_env} must name one variable, or one for each of {len(self.urls)} servers",
        )

    @property
    def urls(self) -> list[str]:
        """The servers. Empty: the engine in this process."""
        given = self.url if isinstance(self.url, list) else [self.url]
        return [str(url) for url in given if url not in (None, "")]


def base_url(url: str) -> str:
    """Return the base URL of OpenAI's interface: `/v1` is added where it is missing."""
    plain = url.rstrip("/")
    return plain if plain.endswith("/v1") else f"{plain}/v1"


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # not a port number, brackets that do not close
        usable = False
    require(usable, f"url={url} is no server's address; give it as http://HOST:PORT")
    require(parts.username is None, "url= holds a password, which would be recorded; keys come from key_env")
    require(not parts.query and not parts.fragment, f"url={url} must end with its path: drop ?… and #…")
