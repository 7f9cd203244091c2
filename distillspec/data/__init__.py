"""Prompts, responses, teacher signals, and packing them into batches."""
