"""Creates the objects that the `_target_`s of a config name."""

from collections.abc import Mapping

import hydra.utils
from hydra.errors import InstantiationException
from pydantic import BaseModel

from lowmem.system.errors import Refused


def instantiate(node: BaseModel | Mapping, **more: object) -> object:
    """Creates the object of a node with Hydra's `instantiate`, without the node's key `declares`. A `Refused` that the
    called class or function raises is passed on unchanged.

    Args:
        more: arguments that override the arguments in the node.
    """
    node = node.model_dump(by_alias=True) if isinstance(node, BaseModel) else dict(node)
    node.pop("declares", None)
    try:
        # _convert_="all" gives plain lists and dictionaries, because arguments may be stored in checkpoints
        return hydra.utils.instantiate(node | more, _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, Refused):
            raise error.__cause__ from None
        raise
