"""The engine's thread and the interfaces through which the event loop uses it."""
