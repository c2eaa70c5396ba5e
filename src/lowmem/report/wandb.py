"""Weights & Biases without surprises: online only where it works, never a prompt, one run per job."""

import http.client
import logging
import os
import threading
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

from lightning.pytorch.loggers import Logger

log = logging.getLogger(__name__)

ANSWER_SECONDS = 2.0


def logger(output_dir: str, project: str, name: str | None = None, offline: bool | None = None) -> Logger | None:
    """A W&B logger, or None where wandb is not installed (metrics.csv is written anyway).

    Args:
        offline: None: online where there is a key and a server that answers within two seconds.
    """
    if find_spec("wandb") is None:
        log.info("wandb is not installed: the curves are in metrics.csv and memory.csv alone.")
        return None
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    mode = _mode() if offline is None else ("offline" if offline else "online")
    # `mode` and not `offline=True`: the latter sets an environment variable that outlives this job of a multirun.
    # Offline there is no address to show, only forty lines of chatter behind the run's own table.
    settings = wandb.Settings(quiet=mode == "offline")
    return WandbLogger(project=project, name=name or folder.name, save_dir=str(folder), mode=mode, settings=settings)


def _mode() -> str:
    if "WANDB_MODE" in os.environ:  # the user has already said
        return os.environ["WANDB_MODE"]
    import wandb

    settings = wandb.setup().settings  # environment, settings files and defaults
    url = settings.base_url
    if not (settings.api_key or _key_of_netrc(url)):
        log.info("W&B: no API key, so this run is recorded offline; `wandb sync <run folder>/wandb/*` uploads it.")
    elif not answers(url):
        log.info("W&B: %s does not answer, so this run is recorded offline.", url)
    else:
        return "online"
    return "offline"


def _key_of_netrc(url: str) -> bool:
    """`wandb login` keeps the key there."""
    from requests.utils import get_netrc_auth

    return get_netrc_auth(url) is not None


def answers(url: str, seconds: float = ANSWER_SECONDS) -> bool:
    """Whether the server sends any HTTP answer in time. In a thread: looking up its name has no time limit."""
    answered: list[bool] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(url, timeout=seconds).close()
        except urllib.error.HTTPError:
            pass  # an error page is an answer too
        except (OSError, http.client.HTTPException):
            return
        answered.append(True)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(answered)
