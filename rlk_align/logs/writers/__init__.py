"""Log-probs of a training run, written as the neutral file from within the training script."""
