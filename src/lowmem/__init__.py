"""lowmem: fine-tune causal language models that do not fit on the card."""

import logging

# torchao names, at import, the CUDA kernels that it cannot load: transformers imports it in every run.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
