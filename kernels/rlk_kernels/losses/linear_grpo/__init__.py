"""linear_grpo_loss: the clipped policy loss from hidden states, with its gradients."""
