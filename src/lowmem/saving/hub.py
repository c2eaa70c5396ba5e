"""Implements `push=<hub id>`: uploads model/ to the Hugging Face hub, after everything else of the run is written."""

import logging
from pathlib import Path

from lowmem.config.typed_lines import in_shell

log = logging.getLogger(__name__)


def push(folder: Path, name: str, run: Path) -> None:
    """Uploads a folder, to a new private repository if there is none. An error is logged, and the run is unharmed.

    Args:
        folder: model/ of a run; run: its folder, for the command to type after an error.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(name, private=True, exist_ok=True)
        place = api.upload_folder(repo_id=name, folder_path=folder, commit_message="Trained with lowmem")
    except Exception as error:  # no network, no token, no right, no room, or no such name: each has its own class
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        log.warning(
            f"push={name}: {folder.name}/ could not be uploaded ({reason}). The run is complete. With a network, and "
            f"after `hf auth login`, type {in_shell('export', run)} {in_shell('push', name)}."
        )
    else:
        log.info(f"push={name}: {folder.name}/ is at {place}")
