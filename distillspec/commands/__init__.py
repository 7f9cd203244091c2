"""One module a command: `run(config, folder)` does the work and leaves `summary.json` in the folder."""
