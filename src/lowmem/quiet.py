"""Libraries' remarks on themselves, and on what is meant here, are left out."""

import logging
import os
import warnings

from transformers.utils.logging import disable_progress_bar, set_verbosity_error


def quiet() -> None:
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message=".*_stable_hash_for_caching")  # torch, of torchao's classes
    disable_progress_bar()
    set_verbosity_error()  # load reports: what a file lacks is refused in a sentence
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
