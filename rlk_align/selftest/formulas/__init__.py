"""The formulas of faulty operators, on canonical tensors and so the same for every engine."""
