"""lowmem: fine-tune causal language models that do not fit on the card."""

import logging

# On import, torchao and bitsandbytes log which kernels they cannot load on this machine. Hide these messages.
for _name in ("torchao", "torch.utils._pytree", "bitsandbytes"):
    logging.getLogger(_name).setLevel(logging.ERROR)
