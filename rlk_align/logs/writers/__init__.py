"""Writers of the neutral file, which a training script calls."""
