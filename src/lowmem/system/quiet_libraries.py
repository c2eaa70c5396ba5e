"""Silences progress bars of transformers, and warnings that libraries print about themselves or about settings that
lowmem chooses on purpose."""

import logging
import os
import warnings

from transformers.utils.logging import disable_progress_bar, set_verbosity_error


def quiet() -> None:
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message=".*_stable_hash_for_caching")  # from torch, about torchao's classes
    warnings.filterwarnings("ignore", message="`broadcast_buffers`")  # older torch versions lack its replacement
    # from fully_shard, when ranks gather the outputs of a model: lowmem never changes logits in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    disable_progress_bar()
    set_verbosity_error()  # hides reports of missing weights: lowmem itself refuses incomplete files
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
