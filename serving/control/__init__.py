"""Speculation lengths: `LengthController` and its implementations."""
