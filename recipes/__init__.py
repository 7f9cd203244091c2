"""Runnable studies, one folder each, installed as `distillspec.recipes`."""

if __name__ != "distillspec.recipes":
    raise ImportError(f"import distillspec.recipes, not {__name__}: it is one package under one name")
