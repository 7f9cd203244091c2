"""The serving engine, installed as `distillspec.serving`."""

if __name__ != "distillspec.serving":
    # A second copy under another name would have its own classes, registries and metrics.
    raise ImportError(f"import distillspec.serving, not {__name__}: it is one package under one name")
