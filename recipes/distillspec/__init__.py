"""The DistillSpec study: which loss on whose text, under one budget a cell."""
