"""latent_attention: attention over latents, which are keys and values of all heads."""
