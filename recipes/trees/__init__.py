"""Study of tree shapes, lossy verification and joined sources (`python -m distillspec.recipes.trees`)."""
