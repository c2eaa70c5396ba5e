"""Silences remarks of libraries about themselves, and about settings that are intended here."""

import logging
import os
import warnings

from transformers.utils.logging import disable_progress_bar, set_verbosity_error


def quiet() -> None:
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message=".*_stable_hash_for_caching")  # torch, of torchao's classes
    warnings.filterwarnings("ignore", message="`broadcast_buffers`")  # its successor is not in older torch
    # of fully_shard, where ranks have put together what a model returns: nobody here changes logits in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    disable_progress_bar()
    set_verbosity_error()  # load reports: what a file lacks is refused in a sentence
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
