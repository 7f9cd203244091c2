"""Counting of drafted tokens that were tried and accepted."""

from __future__ import annotations


def count_trials(accepted: int, depth: int) -> int:
    """Return how many drafted tokens of one window were tried: the accepted ones and the first rejected one.

    Tokens behind a rejection were never tried and say nothing about acceptance.

    Args:
        accepted: drafted tokens that were accepted.
        depth: the most tokens that could have been accepted.
    """
    return min(accepted + 1, depth)


def acceptance_rate(accepted: float, tried: float) -> float | None:
    """Return α per trial, None before any trial."""
    return accepted / tried if tried else None
