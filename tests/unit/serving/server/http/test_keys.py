"""API keys from files and the environment, and their comparison."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from distillspec.config import ServerConfig
from distillspec.errors import ConfigError
from distillspec.serving.server.http.keys import ADMIN_KEY, API_KEYS, KeyRing, load_admin_key, load_api_keys


def test_keys_come_from_file_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nalice: alice-key-1\n\nbare-key-22\n")
    monkeypatch.setenv(API_KEYS, "from-env-1, from-env-2")
    ring = load_api_keys(ServerConfig(api_key_file=str(file)))
    tenants = [ring.tenant(key) for key in ("alice-key-1", "bare-key-22", "from-env-2", "alice", "")]
    assert tenants == ["alice", "default", "default", None, None]
    assert b"alice-key-1" not in pickle.dumps(ring)
    monkeypatch.setenv(ADMIN_KEY, "admin-key-1")
    assert load_admin_key(ServerConfig()).tenant("admin-key-1") == "admin"


@pytest.mark.parametrize("text", ["", "# nothing\n", "alice:short\n", "alice:käse-käse-käse\n"])
def test_an_unusable_key_file_is_refused_without_quoting_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        load_api_keys(ServerConfig(api_key_file=str(file)))
    assert "short" not in str(refusal.value)
    assert "käse" not in str(refusal.value)
    with pytest.raises(ConfigError, match="cannot read"):
        load_api_keys(ServerConfig(api_key_file=str(tmp_path / "none")))


KEY, OTHER = "one-and-the-same", "another-secret"


@pytest.mark.parametrize(
    ("text", "environment", "problem"),
    [
        (f"alice:{OTHER}\nalice:{KEY}\nbob:{KEY}\n", "", "API keys 2 and 3 are the same for two names"),
        (f"alice:{KEY}\n{KEY}\n", "", "API keys 1 and 2 are the same for two names"),
        (f"alice:{KEY}\n", f"{OTHER},{KEY}", "API keys 1 and 3 are the same for two names"),
        (f"alice:{OTHER}\n:{KEY}\n", "", "API key 2 has an empty name; write NAME:KEY"),
    ],
)
def test_a_key_of_two_names_or_of_none_is_refused_by_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, environment: str, problem: str
) -> None:
    (tmp_path / "keys").write_text(text)
    monkeypatch.setenv(API_KEYS, environment)
    with pytest.raises(ConfigError, match=problem) as refusal:
        load_api_keys(ServerConfig(api_key_file=str(tmp_path / "keys")))
    assert KEY not in str(refusal.value)
    assert OTHER not in str(refusal.value)


def test_a_key_may_be_listed_twice_for_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text(f"default:{KEY}\n{KEY}\n")
    monkeypatch.setenv(API_KEYS, KEY)
    assert load_api_keys(ServerConfig(api_key_file=str(tmp_path / "keys"))).tenant(KEY) == "default"


def test_a_client_has_not_the_admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADMIN_KEY, KEY)
    with pytest.raises(ConfigError, match="the admin key is an API key too") as refusal:
        load_admin_key(ServerConfig(), KeyRing([("alice", OTHER), ("bob", KEY)]))
    assert KEY not in str(refusal.value)
    assert load_admin_key(ServerConfig(), KeyRing([("alice", OTHER)])).tenant(KEY) == "admin"


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def watch(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("distillspec.serving.server.http.keys.hmac.compare_digest", watch)
    ring = KeyRing([("a", "first-key"), ("b", "second-key"), ("c", "third-key")])
    assert ring.tenant("first-key") == "a"
    assert len(compared) == 3  # no early end, whichever key it was
    assert {len(one) for pair in compared for one in pair} == {32}  # digests: lengths tell nothing
