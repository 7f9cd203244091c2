"""Controllers to compare with."""
