"""lowmem: fine-tune causal language models that do not fit on the card."""

import logging

# torchao and bitsandbytes name, at import, the kernels for other machines that they cannot load.
for _name in ("torchao", "torch.utils._pytree", "bitsandbytes"):
    logging.getLogger(_name).setLevel(logging.ERROR)
