"""Creates the logger of Weights & Biases without asking the user for input. Unless the user has chosen a mode, the run
is logged offline if no API key is set or the server does not answer."""

import http.client
import logging
import os
import shlex
import textwrap
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path, PurePath

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from lightning.pytorch.loggers import Logger

from lowmem.config.typed_lines import FOLDERS, PLACES, as_mapping, as_only_source
from lowmem.report import folders, ran

log = logging.getLogger(__name__)

ANSWER_SECONDS = 2.0
MOST_OF_A_NAME, MOST_OF_A_TAG = 128, 64  # maximum characters in W&B


def logger(  # noqa: PLR0913
    output_dir: str,
    project: str,
    name: str | None = None,
    group: str | None = None,
    tags: Sequence[str] | None = None,
    offline: bool | None = None,
    run_id: str | None = None,
) -> Logger | None:
    """Returns a W&B logger, or None if wandb is not installed. Each job of a sweep is a separate W&B run.

    Args:
        output_dir: the run's folder.
        project: name of the W&B project.
        name: name of the W&B run. None: for a job of a sweep, the overrides in which jobs differ; otherwise the name of
            the run's folder.
        group: group of the W&B run. None: the last two components of the sweep's path; no group without a sweep.
        tags: None: the chosen techniques that have an effect, such as "optim=adamw".
        offline: None: the mode in the environment variable WANDB_MODE. If it is not set, the run is online if an API
            key is set and the server answers within two seconds.
        run_id: id of the W&B run to continue. None: start a new run.
    """
    if find_spec("wandb") is None:
        log.info("wandb is not installed: metrics are only written to metrics.csv and memory.csv.")
        return None
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    sweep, differs = of_sweep(folder)
    mode = _mode(folder) if offline is None else ("offline" if offline else "online")
    run = wandb.init(  # W&B warns about a setting that Lightning's logger would pass
        project=project,
        name=name or differs or folder.name,
        group=group or sweep,
        tags=[tag[:MOST_OF_A_TAG] for tag in (_chosen(folder) if tags is None else tags)],
        dir=folder,
        id=run_id,
        resume="allow" if run_id else None,
        # an argument and not an environment variable, which would also affect later jobs
        mode=mode,
        settings=wandb.Settings(silent=True),  # mutes W&B's output; lowmem logs the URL itself
    )
    if mode == "online":
        log.info("W&B: %s", run.url)
    run.define_metric("trainer/global_step")  # the x-axis of Lightning's logger
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    return WandbLogger(experiment=run, save_dir=folder)


def of_sweep(folder: Path) -> tuple[str | None, str | None]:
    """Returns the default group and name of the W&B run of a sweep's job. The group is the last two components of the
    sweep's path. The name lists the overrides that the sweep varies, except for the keys in FOLDERS, with paths at the
    end; it is shortened to at most MOST_OF_A_NAME characters. Returns (None, None) if the folder does not belong to a
    sweep."""
    if (sweep := folders.sweep_of(folder)) is None:
        return None, None
    content = yaml.safe_load((sweep / "multirun.yaml").read_text(encoding="utf-8"))
    typed = OverridesParser.create().parse_overrides(content["hydra"]["overrides"]["task"])
    same = {override.key_or_group for override in typed if not override.is_sweep_override()}
    differs = {key: value for key, value in as_mapping(folders.load(folder).overrides).items() if key not in same}
    own = [f"{key}={_shortened(value)}" for key, value in sorted(differs.items(), key=_is_place) if key not in FOLDERS]
    return "/".join(sweep.parts[-2:]), textwrap.shorten(" ".join(own), MOST_OF_A_NAME, placeholder=" ...")


def _is_place(line: tuple[str, str]) -> bool:
    return as_only_source(line[0]) in PLACES


def _shortened(value: str) -> str:
    """Shortens a local path to its last two components. Returns any other value unchanged."""
    return "/".join(PurePath(value).parts[-2:]) if value.startswith(("/", "~", ".")) else value


def _chosen(folder: Path) -> list[str]:
    """Returns the chosen techniques from Hydra's file in the run's folder. Returns an empty list if the folder has no
    such file, as for a run from a notebook."""
    file = folder / ".hydra" / "hydra.yaml"
    return (
        ran.chosen(yaml.safe_load(file.read_text(encoding="utf-8"))["hydra"]["runtime"]["choices"])
        if file.is_file()
        else []
    )


def _mode(folder: Path) -> str:
    if "WANDB_MODE" in os.environ:  # the user has chosen a mode
        return os.environ["WANDB_MODE"]
    import wandb

    settings = wandb.setup().settings  # environment variables, settings files and defaults
    url = settings.base_url
    if not (settings.api_key or _key_of_netrc(url)):
        why = "no API key"
    elif not answers(url):
        why = f"{url} does not answer"
    else:
        return "online"
    log.info(f"W&B: {why}, so this run is logged offline. Upload it with `{_upload(folder)}`.")
    return "offline"


def _upload(folder: Path) -> str:
    """Returns the command that uploads all offline runs in this folder. A run that was resumed consists of several
    offline runs. W&B uploads them in chronological order, so that each continues the previous one."""
    return f"wandb sync {shlex.quote(str(folder / 'wandb'))}/offline-run-*"


def _key_of_netrc(url: str) -> bool:
    """Returns True if the user's netrc file, in which `wandb login` stores API keys, has a key for this server."""
    from requests.utils import get_netrc_auth

    return get_netrc_auth(url) is not None


def answers(url: str, seconds: float = ANSWER_SECONDS) -> bool:
    """Returns True if the server answers within `seconds`. The request runs in a separate thread, because a name lookup
    has no timeout."""
    answered: list[bool] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(url, timeout=seconds).close()
        except urllib.error.HTTPError:
            pass  # an error page counts as an answer
        except (OSError, http.client.HTTPException):
            return
        answered.append(True)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(answered)
