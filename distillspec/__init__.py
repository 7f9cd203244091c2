"""distillspec: distil draft models, serve them with exact speculative decoding, and keep them improving."""

__version__ = "0.1.0"
