"""Commands that run parts of the engine: `run(config, folder)`, as in `distillspec.commands`."""
