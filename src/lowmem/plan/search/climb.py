"""Finds the fastest settings (checkpointing, loss, micro-batch size) with which a route of `candidates.py` fits.
`recipes.py` runs this search for each route.

    checkpointing   nothing recomputed -> ... -> inputs of blocks offloaded     slower, fewer activations
    loss            full -> chunked -> tiled                                    slower, smaller logits
    micro-batch     largest -> ... -> smallest                                  slower, smaller activations and logits

In each row, speed and memory are assumed to decrease from left to right. So few recipes have to be traced: the largest
micro-batch that fits is found by bisection, and a checkpointing and a loss that do not fit with the smallest
micro-batch are not tried with larger ones.
"""

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple, Protocol


class Settings(NamedTuple):
    """The settings that a route leaves open. Args: size: an index into `Route.micro_batches`; 0 is the largest."""

    checkpointing: str
    loss: str
    size: int


class Looked(Protocol):
    """The attributes of a traced recipe (`recipes.Recipe`) that this module uses."""

    seconds: float  # seconds of an optimizer step


class Fitting(NamedTuple):
    """Settings that fit, and the recipe with these settings."""

    settings: Settings
    recipe: Looked


# returns the traced recipe with the given settings; None: the recipe is refused, or is known not to fit on the card
Look = Callable[[Settings], Looked | None]


class Climb:
    """Searches the settings of a route.

    Args:
        checkpointings, losses: names of techniques, fastest first.
        smallest: index of the smallest micro-batch; the largest has index 0.
        look: see `Look`.
        fits: returns whether a recipe fits.
    """

    def __init__(
        self,
        checkpointings: Sequence[str],
        losses: Sequence[str],
        smallest: int,
        look: Look,
        fits: Callable[[Looked], bool],
    ) -> None:
        self.checkpointings, self.losses, self.smallest = checkpointings, losses, smallest
        self.look, self.fits = look, fits

    def fastest(self, than: float = math.inf) -> Fitting | None:
        """Returns the fastest settings found that fit and take fewer than `than` seconds per step; None if no such
        settings are found."""
        everything = Settings(self.checkpointings[0], self.losses[0], 0)  # the fastest settings
        looked = self.look(everything)
        if looked is not None and looked.seconds >= than:
            return None
        if looked is not None and self.fits(looked):
            return Fitting(everything, looked)
        found = self._with_less_memory()
        return found if found is not None and found.recipe.seconds < than else None

    def of_least_memory(self) -> Looked | None:
        """Returns the recipe that needs the least memory: with the smallest micro-batch, the slowest loss, and the
        slowest checkpointing. Settings for which `look` returns None are skipped. None: `look` returns None for all
        settings with the smallest micro-batch."""
        ways = product(reversed(self.losses), reversed(self.checkpointings))
        looked = (self.look(Settings(checkpointing, loss, self.smallest)) for loss, checkpointing in ways)
        return next((recipe for recipe in looked if recipe is not None), None)

    def _with_less_memory(self) -> Fitting | None:
        """Searches settings that need less memory than the fastest settings of the route. Returns: the fastest of the
        tried settings that fit; None if no tried settings fit.

        Once settings have been found that fit, a slower checkpointing or loss is tried only with a larger micro-batch:
        with the same or a smaller micro-batch it would be slower than the settings found. If the route has several
        losses, the fastest loss, which needs the most memory, is tried only at the end, with the best settings found.
        """
        found = None
        for loss in self.losses[1:] or self.losses:
            begin = 0 if found is None else self.checkpointings.index(found.settings.checkpointing)
            for checkpointing in self.checkpointings[begin:]:
                size = self.smallest if found is None else found.settings.size - 1
                if size < 0:
                    break
                looked = self.look(settings := Settings(checkpointing, loss, size))
                if found is not None and looked is not None and looked.seconds >= found.recipe.seconds:
                    break
                if looked is not None and self.fits(looked):
                    found = self._largest(Fitting(settings, looked))
        return found and self._faster(found, found.settings._replace(loss=self.losses[0]))

    def _largest(self, found: Fitting) -> Fitting:
        """Finds by bisection the largest micro-batch with which the given checkpointing and loss fit. Args: found:
        settings that fit."""
        too_large = -1  # index of a micro-batch
        while found.settings.size - too_large > 1:
            middle = (too_large + found.settings.size) // 2
            larger = self._if_it_fits(found.settings._replace(size=middle))
            too_large, found = (middle, found) if larger is None else (too_large, larger)
        return found

    def _faster(self, found: Fitting, settings: Settings) -> Fitting:
        other = self._if_it_fits(settings)
        return other if other is not None and other.recipe.seconds < found.recipe.seconds else found

    def _if_it_fits(self, settings: Settings) -> Fitting | None:
        recipe = self.look(settings)
        return Fitting(settings, recipe) if recipe is not None and self.fits(recipe) else None
