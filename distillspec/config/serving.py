"""Settings of the HTTP server."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from distillspec.config.checks import one_of, require

MOST_N, MOST_PROMPTS = 1024, 4096  # of a request, whatever a server's own bounds are


@dataclass
class ServerConfig:
    """The HTTP server. Keys also come from the environment: DISTILLSPEC_API_KEYS (commas), DISTILLSPEC_ADMIN_KEY."""

    host: str = "127.0.0.1"  # an address of this machine; 0.0.0.0 for all of them
    port: int = 8000  # 0: any free one
    allow_open: bool = False  # listen beyond this machine without an API key
    api_key_file: str | None = None  # NAME:KEY or KEY a line; the name is the tenant
    admin_key_file: str | None = None  # the key of /admin, on its first line
    metrics_key: str = "any"  # key for /metrics from other machines: none | any | admin (for the dashboard too)
    cors_origins: list[str] = field(default_factory=list)  # origins of web pages that may call from a browser
    model_name: str | None = None  # name of the model for clients; null: the target's name
    drafts_folder: str | None = None  # folder of drafts that /admin/drafts may load by name
    max_queue: int = 64  # answers that may wait for a slot; others are refused
    full_status: int = 429  # status of that refusal: 429 | 503
    tenant_share: float = 1.0  # the largest share of slots and queue for one tenant
    max_domains: int = 32  # names of speculation.domain counted apart; further ones count as "other"
    domains: list[str] = field(default_factory=list)  # the names counted apart; empty: those in use
    max_n: int = 16  # answers per prompt
    max_prompts: int = 64  # prompts per request to /v1/completions
    deadline_s: float = 600.0  # seconds after which a request ends
    drain_s: float = 30.0  # SIGTERM: seconds for running requests to end
    max_body_kib: int = 4096  # request body
    max_connections: int = 1024
    header_timeout_s: float = 10.0  # for a client to send a request's headers
    body_timeout_s: float = 30.0  # for a client to send its body
    write_timeout_s: float = 60.0  # for a client to read the answer
    log_format: str = "json"  # json | text: one line per request, on stderr
    tracing: bool = False  # OpenTelemetry spans; start under opentelemetry-instrument to send them

    def __post_init__(self) -> None:
        require(0 <= self.port < 65536, f"server.port={self.port} must be in 0..65535")
        require(bool(self.host), "server.host is empty; give an address, as in server.host=127.0.0.1")
        require(self.full_status in (429, 503), f"server.full_status={self.full_status} must be 429 or 503")
        one_of("server.metrics_key", self.metrics_key, ("any", "admin", "none"))
        require(0 < self.tenant_share <= 1, f"server.tenant_share={self.tenant_share} must be in (0, 1]")
        one_of("server.log_format", self.log_format, ("json", "text"))
        require(self.max_queue >= 0, f"server.max_queue={self.max_queue} must be at least 0")
        for name in ("max_domains", "max_n", "max_prompts", "max_body_kib", "max_connections"):
            require(getattr(self, name) >= 1, f"server.{name}={getattr(self, name)} must be at least 1")
        for name, most in (("max_n", MOST_N), ("max_prompts", MOST_PROMPTS)):
            require(getattr(self, name) <= most, f"server.{name}={getattr(self, name)} must be at most {most}")
        for name in ("deadline_s", "header_timeout_s", "body_timeout_s", "write_timeout_s"):
            require(getattr(self, name) > 0, f"server.{name}={getattr(self, name)} must be above 0")
        require(
            len(self.domains) <= self.max_domains,
            f"server.domains has {len(self.domains)} names, and server.max_domains={self.max_domains}; raise that",
        )
        require(self.drain_s >= 0, f"server.drain_s={self.drain_s} must be at least 0")
        require("*" not in self.cors_origins, "server.cors_origins=[*] lets every page in; name the origins")

    @property
    def is_local(self) -> bool:
        """True when only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
