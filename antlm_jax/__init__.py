"""One transformer, trained with causal and masked language modeling."""
