"""add_lora: the update of a LoRA adapter on a projection's output, by row."""
