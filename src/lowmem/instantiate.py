"""The objects that the targets of a config name."""

from collections.abc import Mapping

import hydra.utils
from hydra.errors import InstantiationException
from pydantic import BaseModel

from lowmem.errors import Refused


def instantiate(node: BaseModel | Mapping, **more: object) -> object:
    """Hydra's, but what the called class refused comes through as it was said, and what a technique declares is no
    argument of its class.

    Args: more: arguments in the place of the node's own.
    """
    node = node.model_dump(by_alias=True) if isinstance(node, BaseModel) else dict(node)
    node.pop("declares", None)
    try:
        return hydra.utils.instantiate(node | more, _convert_="all")  # plain lists: they end up in checkpoints
    except InstantiationException as error:
        if isinstance(error.__cause__, Refused):
            raise error.__cause__ from None
        raise
