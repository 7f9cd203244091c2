"""From logits to tokens: noise, sampling and verification."""
