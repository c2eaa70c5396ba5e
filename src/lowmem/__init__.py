"""lowmem: fine-tune causal language models that do not fit on the card."""

import logging

# When they are imported, torchao and bitsandbytes log kernels for other machines that they cannot load. Hide these
# messages.
for _name in ("torchao", "torch.utils._pytree", "bitsandbytes"):
    logging.getLogger(_name).setLevel(logging.ERROR)
