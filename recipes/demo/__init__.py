"""The demo: a draft for SmolLM2 from nothing, with what it gained."""
