"""Judging drafts on logged answers that they have not learnt from: scores, evidence, and when it suffices."""
