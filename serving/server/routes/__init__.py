"""What answers which path."""
