"""Costs of forward passes: one table, measured at start or by `distill profile`, and corrected by live steps."""
