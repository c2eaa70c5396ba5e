"""Lightning's and transformers' remarks on what is meant here are left out."""

import logging
import os
import warnings

from transformers.utils.logging import disable_progress_bar


def quiet() -> None:
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    disable_progress_bar()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
