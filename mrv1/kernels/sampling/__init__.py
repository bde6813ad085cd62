"""From logits to tokens: edits, bad words, the draw, log-probabilities."""
