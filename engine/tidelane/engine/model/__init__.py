"""The model: finding, loading and running it over a paged KV cache, and drawing tokens from its logits."""
