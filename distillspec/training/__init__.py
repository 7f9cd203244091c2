"""Training a draft: feed, loss module, strategy, loop, checkpoints."""
