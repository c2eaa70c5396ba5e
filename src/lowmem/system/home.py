"""Redirects the caches that libraries keep below the home folder, which may be read-only or missing in a container."""

import atexit
import os
import shutil
import tempfile

# wandb's uploads, matplotlib's settings, the index that `datasets` keeps of local files, and compiled code
FOLDERS = (
    "WANDB_DATA_DIR",
    "WANDB_CACHE_DIR",
    "WANDB_CONFIG_DIR",
    "MPLCONFIGDIR",
    "HF_DATASETS_CACHE",
    "XDG_CACHE_HOME",
)


def replace_if_read_only() -> None:
    """Points the libraries to a temporary folder if the home folder cannot be written.

    Must be called before the libraries are imported. Child processes inherit the folder.
    """
    home = os.path.expanduser("~")  # remains "~" for a user without a home folder, where pathlib raises
    if os.access(home, os.W_OK) or all(name in os.environ for name in FOLDERS):
        return
    # models that were downloaded before are still found
    os.environ.setdefault("HF_HOME", f"{os.environ.get('XDG_CACHE_HOME', f'{home}/.cache')}/huggingface")
    folder = tempfile.mkdtemp(prefix="lowmem-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in FOLDERS:
        os.environ.setdefault(name, folder)
