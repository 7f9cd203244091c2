"""Proposers of drafted tokens: draft models and prompt lookup."""
