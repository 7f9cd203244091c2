"""Selection among several drafts: which one drafts for a request."""
