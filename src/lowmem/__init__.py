"""lowmem: fine-tune causal language models that do not fit on the card."""
