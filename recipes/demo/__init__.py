"""The demo: a draft for SmolLM2, trained from nothing, with a report."""
