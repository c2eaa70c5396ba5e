"""Runs train.py without training, in a separate process that claims its output folder at the same time as other
processes."""

import os
import sys
from datetime import datetime
from pathlib import Path


def live(root: str, cwd: str, arguments: list[str], together, number: int, claims: bool) -> None:
    """Runs train.py with `arguments`.

    Args:
        together: a barrier at which all processes wait for each other, at the start and before the end.
        number: number of this process.
        claims: False is a deliberate mistake: the process does not claim its folder.
    """
    sys.path.insert(0, root)
    os.chdir(cwd)
    os.dup2(os.open(f"said-{number}.txt", os.O_WRONLY | os.O_CREAT), 2)

    import hydra.core.utils
    import train
    from hydra.core.hydra_config import HydraConfig

    from lowmem.command import cli
    from lowmem.command.folder_lock import Claim

    class Clock(datetime):
        @classmethod
        def now(cls):
            return cls(2026, 1, 31, 12)

    def job(_) -> None:
        with (Path(HydraConfig.get().runtime.output_dir) / "summary.json").open("a") as file:
            file.write(f"{number}\n")
        together.wait(60)

    if not claims:
        Claim.on_run_start = Claim.on_multirun_start = lambda *_, **__: None
    hydra.core.utils.datetime = Clock  # all processes see the same time, so their default folders are equal
    cli.run = job
    sys.argv = ["train.py", *arguments]
    together.wait(60)
    try:
        cli.start(train.main)
    except SystemExit:
        together.wait(60)  # folders stay claimed until all processes have tried to claim them
        raise
