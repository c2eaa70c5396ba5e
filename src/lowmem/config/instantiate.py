"""Creates the objects that the `_target_`s of a config name."""

from collections.abc import Mapping

import hydra.utils
from hydra.errors import InstantiationException
from pydantic import BaseModel

from lowmem.system.errors import Refused


def instantiate(node: BaseModel | Mapping, **more: object) -> object:
    """Calls Hydra's `instantiate` without `declares`. A `Refused` that the called class raises is passed on unchanged.

    Args:
        more: arguments that override the node's.
    """
    node = node.model_dump(by_alias=True) if isinstance(node, BaseModel) else dict(node)
    node.pop("declares", None)
    try:
        return hydra.utils.instantiate(node | more, _convert_="all")  # plain lists: they end up in checkpoints
    except InstantiationException as error:
        if isinstance(error.__cause__, Refused):
            raise error.__cause__ from None
        raise
