"""Servers to send loads to."""

from __future__ import annotations

from ..server.conftest import guarded, serve, served  # noqa: F401 (fixtures)
