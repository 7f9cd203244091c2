"""The gate for draft versions: scoring, decision, canary, rollback."""
