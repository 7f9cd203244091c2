"""Load on an engine or a server, and what it answered: `distill bench`."""
