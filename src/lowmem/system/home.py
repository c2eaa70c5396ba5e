"""Redirects the caches of libraries to a temporary folder if the home folder is read-only or missing, as in some
containers."""

import atexit
import os
import shutil
import tempfile

# environment variables that name the folders for wandb's files, for matplotlib's settings, for the cache of `datasets`,
# and for the caches of lowmem's compiled optimizers and of libraries that read XDG_CACHE_HOME
FOLDERS = (
    "WANDB_DATA_DIR",
    "WANDB_CACHE_DIR",
    "WANDB_CONFIG_DIR",
    "MPLCONFIGDIR",
    "HF_DATASETS_CACHE",
    "XDG_CACHE_HOME",
)


def replace_if_read_only() -> None:
    """If the home folder is not writable, sets environment variables so that libraries write to a temporary folder.
    Variables that are already set are kept. The cache of downloaded models (HF_HOME) stays in its folder.

    Must be called before the libraries are imported. Child processes use the same folder, which is deleted when this
    process exits.
    """
    home = os.path.expanduser("~")  # for a user without a home folder, the result is "~" (pathlib would raise an error)
    if os.access(home, os.W_OK) or all(name in os.environ for name in FOLDERS):
        return
    # so that models which were downloaded earlier are still found
    os.environ.setdefault("HF_HOME", f"{os.environ.get('XDG_CACHE_HOME', f'{home}/.cache')}/huggingface")
    folder = tempfile.mkdtemp(prefix="lowmem-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in FOLDERS:
        os.environ.setdefault(name, folder)
