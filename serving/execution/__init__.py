"""Forward passes of a model over its slot cache: memory, attention, graphs, packed weights."""
