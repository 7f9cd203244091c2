"""Costs of passes, measured at start or by `distill profile` and corrected by live steps, and acceptance, learnt too."""
