"""Load on an engine or a server, and its measured answers: `distill bench`."""
