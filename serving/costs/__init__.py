"""Costs of passes, measured at start or by `distill profile`, and acceptance, both corrected by live steps."""
