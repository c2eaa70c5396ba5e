"""Implements `push=<hub id>`: uploads model/ to the Hugging Face hub."""

import logging
from pathlib import Path

from lowmem.system.errors import NotPublished, first_line

log = logging.getLogger(__name__)


def push(folder: Path, name: str, again: str) -> None:
    """Uploads a folder to the Hugging Face hub. If the repository does not exist, a private repository is created.

    Args:
        folder: model/ of a run.
        name: the repository on the hub.
        again: the `export=` override with which the user can repeat the upload, for the error message.

    Raises:
        NotPublished: the upload failed. The message has the reason and the overrides to type.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(name, private=True, exist_ok=True)
        place = api.upload_folder(repo_id=name, folder_path=folder, commit_message="Trained with lowmem")
    except Exception as error:  # failed connections, bad tokens and full quotas have no common class
        reason = first_line(error)
        raise NotPublished(
            f"push={name}: {folder.name}/ could not be uploaded ({reason}). The run itself is complete. Check the "
            f"network, log in with `hf auth login`, and type {again} push={name}."
        ) from error
    log.info(f"push={name}: uploaded {folder.name}/ to {place}")
