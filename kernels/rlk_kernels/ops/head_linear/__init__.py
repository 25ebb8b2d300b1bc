"""head_linear: multiplies the features of each head by the head's own weight."""
