"""All kinds of drafts, trained for the same minutes on the same text."""
