"""API keys with their tenants, and the key of the admin routes."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from distillspec.config import ServerConfig
from distillspec.errors import ConfigError
from distillspec.serving.server.http.errors import ApiError

API_KEYS, ADMIN_KEY = "DISTILLSPEC_API_KEYS", "DISTILLSPEC_ADMIN_KEY"
SHORTEST = 8  # characters of a key


@dataclass(frozen=True)
class _Key:
    tenant: str
    digest: bytes


class KeyRing:
    """Set of keys, kept as digests so that no log, dump or traceback can contain one."""

    def __init__(self, keys: Iterable[tuple[str, str]] = ()) -> None:
        self._keys = tuple(_Key(tenant, _digest(key)) for tenant, key in keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    @property
    def tenants(self) -> frozenset[str]:
        """The names that have a key."""
        return frozenset(key.tenant for key in self._keys)

    def tenant(self, presented: str) -> str | None:
        """Return the tenant of a key, or None. Compares all keys, each in constant time."""
        digest, tenant = _digest(presented), None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                tenant = key.tenant
        return tenant

    def tenant_of(self, authorization: str | None) -> str | None:
        """Return the tenant of an Authorization header, or None for a missing or wrong key."""
        scheme, _, key = (authorization or "").partition(" ")
        return self.tenant(key.strip()) if scheme.lower() == "bearer" else None

    def require(self, authorization: str | None) -> str:
        """Return the tenant of an Authorization header, or "default" if there are no keys.

        Raises:
            ApiError: 401 for a missing or wrong key.
        """
        if not self._keys:
            return "default"
        tenant = self.tenant_of(authorization)
        if tenant is None:
            problem = "a wrong API key" if authorization else "no API key"
            raise ApiError(
                401,
                f"{problem} was given; send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return tenant


def load_api_keys(config: ServerConfig) -> KeyRing:
    """Read the keys of `server.api_key_file` and of the environment.

    Raises:
        ConfigError: the file cannot be read, a key is too short or two names have the same one (a key is named by its
            number, never quoted), or a name is empty.
    """
    keys = [] if config.api_key_file is None else _read_keys(Path(config.api_key_file))
    keys += [("default", key.strip()) for key in os.environ.get(API_KEYS, "").split(",") if key.strip()]
    first: dict[str, int] = {}
    for number, (tenant, key) in enumerate(keys, 1):
        _check_length(key, f"API key {number}")
        if not tenant:
            raise ConfigError(f"API key {number} has an empty name; write NAME:KEY, or KEY alone")
        if keys[first.setdefault(key, number) - 1][0] != tenant:
            raise ConfigError(f"API keys {first[key]} and {number} are the same for two names; give each its own")
    return KeyRing(keys)


def load_admin_key(config: ServerConfig, others: KeyRing | None = None) -> KeyRing:
    """Read the key of `server.admin_key_file` or of the environment.

    Args:
        others: API keys, none of which may be it.

    Raises:
        ConfigError: the file cannot be read or is empty, or the key is too short, missing or an API key.
    """
    key = os.environ.get(ADMIN_KEY, "").strip()
    if config.admin_key_file is not None:
        lines = _read(Path(config.admin_key_file)).splitlines()
        key = lines[0].strip() if lines else ""
        if not key:
            raise ConfigError(f"server.admin_key_file={config.admin_key_file} is empty; its first line is the key")
    if key:
        _check_length(key, "the admin key")
        if others is not None and others.tenant(key) is not None:
            raise ConfigError("the admin key is an API key too, which would open /admin to a client; use another one")
    elif config.metrics_key == "admin":
        raise ConfigError(f"server.metrics_key=admin needs an admin key: server.admin_key_file=FILE or {ADMIN_KEY}")
    return KeyRing([("admin", key)] if key else [])


def _read_keys(file: Path) -> list[tuple[str, str]]:
    keys = []
    for line in _read(file).splitlines():
        line = line.strip()
        if line and not line.startswith("#"):
            tenant, colon, key = line.partition(":")
            keys.append((tenant.strip(), key.strip()) if colon else ("default", line))
    if not keys:
        raise ConfigError(f"server.api_key_file={file} holds no key; write NAME:KEY lines")
    return keys


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the key file {file}: {getattr(error, 'strerror', None) or error}") from error


def _check_length(key: str, name: str) -> None:
    if len(key) < SHORTEST or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{name} must have at least {SHORTEST} printable ASCII characters")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
