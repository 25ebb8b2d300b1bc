"""The logs of a training run: reading, writing, explaining, rescoring and monitoring them."""
