"""The gate for draft versions: decision, promotion, suspicion, rollback."""
