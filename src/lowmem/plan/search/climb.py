"""Finds the fastest settings with which a route fits, with few recipes to trace.

    checkpointing   nothing recomputed -> ... -> inputs of blocks offloaded     slower, fewer activations
    loss            full -> chunked -> tiled                                    slower, fewer logits
    micro-batch     largest -> ... -> smallest                                  slower, fewer activations and logits

Memory falls from each step to the next, so the largest micro-batch that fits is found by bisection, and a step that
does not fit with the smallest micro-batch fits with none.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


class Settings(NamedTuple):
    """Holds the choices that a route leaves open. Args: size: index of the route's micro-batches, largest first."""

    checkpointing: str
    loss: str
    size: int


class Looked(Protocol):
    """What is known of a recipe once it was traced."""

    seconds: float  # of an optimizer step


class Fitting(NamedTuple):
    """Pairs settings that fit with their recipe."""

    settings: Settings
    recipe: Looked


Look = Callable[[Settings], Looked | None]  # traces a recipe; None: it is refused


class Climb:
    """Searches the settings of a route.

    Args:
        checkpointings, losses: choices, fastest first; smallest: index of the smallest micro-batch, the largest has 0;
        look: traces a recipe; fits: says whether it fits.
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

    def fastest(self, known: Fitting | None = None) -> Fitting | None:
        """Returns the fastest settings that fit; None: none fit, or none is faster than `known`.

        Args:
            known: the best of another route, which is faster with the smallest settings. If the best settings of that
            route are slower here, nothing is faster here; if they fit and are faster, they are taken.
        """
        if known is not None and (same := self._at(*known.settings)) is not None:
            if same.seconds >= known.recipe.seconds:
                return None
            if self.fits(same):
                return Fitting(known.settings, same)
        return self._everything() or self._with_less_memory()

    def _everything(self) -> Fitting | None:
        """Returns the fastest settings of all if they fit."""
        return self._if_it_fits(Settings(self.checkpointings[0], self.losses[0], 0))

    def smallest_that_fits(self) -> Fitting | None:
        """Returns the smallest settings of all if they fit. With them a route is either refused or can be compared."""
        return self._if_it_fits(Settings(self.checkpointings[-1], self.losses[-1], self.smallest))

    def _with_less_memory(self) -> Fitting | None:
        """Goes through the slower choices. Each must be worth it by a larger micro-batch than those before it."""
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
        """Returns the largest micro-batch that fits, by bisection. Args: found: it fits."""
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

    def _at(self, checkpointing: str, loss: str, size: int) -> Looked | None:
        known = checkpointing in self.checkpointings and loss in self.losses
        return self.look(Settings(checkpointing, loss, min(size, self.smallest))) if known else None
