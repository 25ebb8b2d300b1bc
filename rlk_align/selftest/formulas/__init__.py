"""What a faulty operator computes, on canonical tensors: the same for every engine."""
