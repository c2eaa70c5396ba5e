"""Libraries keep files of their own below the home folder, which in a container may be read-only or missing."""

import atexit
import os
import shutil
import tempfile

# wandb's uploads, matplotlib's settings, what `datasets` notes of local files, and code that is compiled here
FOLDERS = (
    "WANDB_DATA_DIR",
    "WANDB_CACHE_DIR",
    "WANDB_CONFIG_DIR",
    "MPLCONFIGDIR",
    "HF_DATASETS_CACHE",
    "XDG_CACHE_HOME",
)


def replace_if_read_only() -> None:
    """Points the libraries to a temporary folder where the home folder cannot be written.

    It has to be called before they are imported. Processes that this one starts get the same folder.
    """
    home = os.path.expanduser("~")  # remains "~" for a user without a home folder, where pathlib raises
    if os.access(home, os.W_OK) or all(name in os.environ for name in FOLDERS):
        return
    # models that somebody has fetched stay where they are
    os.environ.setdefault("HF_HOME", f"{os.environ.get('XDG_CACHE_HOME', f'{home}/.cache')}/huggingface")
    folder = tempfile.mkdtemp(prefix="lowmem-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in FOLDERS:
        os.environ.setdefault(name, folder)
