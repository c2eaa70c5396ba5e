"""Makes a run from the words of a command, without `hydra.main`."""

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from lowmem.command import cli
from lowmem.config import spelling
from lowmem.config.check import settled
from lowmem.config.settle import Run
from lowmem.config.typed_lines import composed
from lowmem.system.errors import Refused


def typed_run(words: list[str], config: str = "config") -> Run:
    """Returns the run of a command. Args: words: arguments of the command; config: name of a main config in conf/.

    Raises:
        Refused: Hydra or lowmem refuses the words. The command would print the same message.
    """
    lines = cli.prepare(words)
    try:
        return settled(composed(lines, config))
    except (HydraException, OmegaConfBaseException) as error:
        raise Refused(spelling.explained(error, lines, config)) from None
