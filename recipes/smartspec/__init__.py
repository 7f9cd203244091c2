"""SmartSpec's figures (Liu et al., 2024), reproduced on simulated machines."""
