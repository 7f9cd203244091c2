"""The trainer process: when to learn, from what, and the update."""
