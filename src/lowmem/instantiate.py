"""Hydra's instantiate, with plain lists and with refusals as they were said."""

import hydra.utils
from hydra.errors import InstantiationException
from omegaconf import DictConfig

from lowmem.errors import Refused


def instantiate(node: DictConfig) -> object:
    """Hydra's, but what the called class refused comes through as it was said."""
    try:
        return hydra.utils.instantiate(node, _convert_="all")  # plain lists: they end up in checkpoints
    except InstantiationException as error:
        if isinstance(error.__cause__, Refused):
            raise error.__cause__ from None
        raise
