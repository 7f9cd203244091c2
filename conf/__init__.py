"""Hydra configs: YAML only, one folder a group; the schema and all defaults are in distillspec.config."""
