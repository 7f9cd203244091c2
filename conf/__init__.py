"""Hydra configs: YAML only, one folder a group. The schema and all defaults are in distillspec.config."""
