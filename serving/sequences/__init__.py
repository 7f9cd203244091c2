"""Sequences: scheduling, slots, and text from tokens."""
