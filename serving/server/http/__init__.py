"""Bodies, keys, limits and errors of the HTTP interface."""
