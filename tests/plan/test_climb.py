"""Tests that the climb search traces few settings, and finds settings that fit and are nearly the fastest. The bytes
and seconds of the settings are made up."""

import math
from dataclasses import dataclass
from itertools import product

import pytest

from lowmem.plan.search.climb import Climb, Settings

CHECKPOINTINGS = {"none": (100, 1.0), "selective": (50, 1.1), "every_layer": (10, 1.3)}  # bytes per sequence, slowdown
LOSSES = {"full": (40, 0.0), "chunked": (2, 0.2), "tiled": (1, 0.5)}  # bytes per sequence, additional seconds
SIZES = [8, 4, 2, 1]
PER_MICRO_BATCH = 0.1  # seconds


@dataclass(frozen=True)
class Made:
    bytes: int
    seconds: float


def made(settings, per_micro_batch=PER_MICRO_BATCH):
    size = SIZES[settings.size]
    of_block, slowness = CHECKPOINTINGS[settings.checkpointing]
    of_loss, more = LOSSES[settings.loss]
    return Made(10 + size * (of_block + of_loss), 8 * slowness + more + per_micro_batch * 8 / size)


def climbed(room, per_micro_batch=PER_MICRO_BATCH, than=math.inf):
    looked = {}

    def look(settings):
        return looked.setdefault(settings, made(settings, per_micro_batch))

    climb = Climb([*CHECKPOINTINGS], [*LOSSES], len(SIZES) - 1, look, lambda recipe: recipe.bytes <= room)
    return climb.fastest(than), looked


def every(room, per_micro_batch=PER_MICRO_BATCH):
    settings = [Settings(*way) for way in product(CHECKPOINTINGS, LOSSES, range(len(SIZES)))]
    return [each for each in settings if made(each, per_micro_batch).bytes <= room]


@pytest.mark.parametrize("per_micro_batch", [0.01, PER_MICRO_BATCH, 2.0])
@pytest.mark.parametrize("room", [2000, 1000, 600, 300, 160, 115, 100, 70, 60, 40, 30, 22])
def test_climb_search_finds_settings_within_5_percent_of_the_fastest_in_12_traces(room, per_micro_batch):
    found, looked = climbed(room, per_micro_batch)
    best = min(made(each, per_micro_batch).seconds for each in every(room, per_micro_batch))
    assert found.recipe.bytes <= room
    assert found.recipe.seconds <= 1.05 * best
    assert len(looked) <= 12


def test_climb_search_traces_one_recipe_if_the_fastest_settings_fit():
    found, looked = climbed(10**6)
    assert found.settings == Settings("none", "full", 0) and len(looked) == 1


def test_climb_search_finds_nothing_if_the_settings_of_least_memory_do_not_fit():
    found, looked = climbed(20)
    assert found is None
    assert Settings("every_layer", "tiled", 3) in looked  # the settings of least memory were tried


def test_climb_search_finds_nothing_unless_some_settings_are_faster_than_another_route():
    """If even the fastest settings are not faster than the other route, one trace suffices. The search is needed
    because a route that is slower with equal settings may fit with faster settings."""
    fastest = made(Settings("none", "full", 0)).seconds
    slower, looked = climbed(70, than=fastest)
    assert slower is None and len(looked) == 1
    found, _ = climbed(70)
    assert climbed(70, than=found.recipe.seconds)[0] is None
    assert climbed(70, than=found.recipe.seconds + 0.01)[0] == found


def test_climb_search_finds_the_settings_of_least_memory_that_are_not_refused():
    def look(settings):
        refused = settings.loss == "tiled" or settings[:2] == ("every_layer", "chunked")
        return None if refused else made(settings)

    climb = Climb([*CHECKPOINTINGS], [*LOSSES], len(SIZES) - 1, look, lambda recipe: True)
    assert climb.of_least_memory() == made(Settings("selective", "chunked", 3))
    assert Climb(["none"], ["full"], 0, lambda _: None, lambda recipe: True).of_least_memory() is None
