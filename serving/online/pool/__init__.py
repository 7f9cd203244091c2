"""Several drafts that learn: which domains each learns from, and specialists cloned for a domain."""
