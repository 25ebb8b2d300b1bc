"""HF transformers, and FSDP2 around it."""
