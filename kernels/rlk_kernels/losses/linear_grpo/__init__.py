"""linear_grpo_loss: that loss from hidden states, with its gradients."""
