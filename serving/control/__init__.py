"""How many tokens each row drafts: `LengthController` and its implementations."""
