"""SmartSpec's figures (Liu et al., 2024), imitated on simulated machines."""
