"""Megatron-core: model, converter, layouts, taps."""
