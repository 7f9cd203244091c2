"""Runnable studies, one folder each, installed as `distillspec.recipes`."""
