"""Routes of the HTTP interface, one module for each group of paths."""
