"""A config as values, and the objects that its targets name."""

import hydra.utils
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf, open_dict

from lowmem.errors import Refused


def instantiate(node: DictConfig) -> object:
    """Hydra's, but what the called class refused comes through as it was said, and what a technique declares is no
    argument of its class."""
    if "declares" in node:
        node = node.copy()  # whose interpolations still see the whole
        with open_dict(node):
            del node["declares"]
    try:
        return hydra.utils.instantiate(node, _convert_="all")  # plain lists: they end up in checkpoints
    except InstantiationException as error:
        if isinstance(error.__cause__, Refused):
            raise error.__cause__ from None
        raise


def plain(cfg: DictConfig) -> DictConfig:
    """A copy without interpolations."""
    return OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
