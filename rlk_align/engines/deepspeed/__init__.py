"""DeepSpeed around HF transformers: ZeRO shards what is trained."""
