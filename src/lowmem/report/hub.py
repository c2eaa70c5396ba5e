"""`push=<hub id>`: model/ goes to the Hugging Face hub, when everything of the run is in its folder already."""

import logging
from pathlib import Path

from lowmem.overrides import in_shell

log = logging.getLogger(__name__)


def push(folder: Path, name: str, run: Path) -> None:
    """A repository that is not there yet is made, a private one. Whatever goes wrong costs the run nothing.

    Args:
        folder: what is uploaded; run: whose it is, to be named in what to type.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(name, private=True, exist_ok=True)
        place = api.upload_folder(repo_id=name, folder_path=folder, commit_message="Trained with lowmem")
    except Exception as error:  # no network, no token, no right, no room, or no such name: each has its own class
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        log.warning(
            f"push={name}: {folder.name}/ could not be uploaded ({said}). The run is whole. With a network, and after "
            f"`hf auth login`, type {in_shell('export', run)} {in_shell('push', name)}."
        )
    else:
        log.info(f"push={name}: {folder.name}/ is at {place}")
