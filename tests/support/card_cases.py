"""Made-up cases for tests of `python -m benchmarks.card`."""

import os
import subprocess
import sys
import time

from benchmarks.card.case import LeftOut

ROW = {"run": "made up", "by": "lowmem", "found": {"text": "a|b"}}


def well(here):
    yield ROW | {"found": {"device": here.device, "folder": str(here.folder)}}


def fails(here):
    yield ROW
    raise ZeroDivisionError("at the second row")


def dies(here):
    yield ROW
    os.abort()


def endless(here):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield ROW | {"found": {"child": child.pid}}
    time.sleep(600)


def left_out(here):
    yield ROW
    raise LeftOut("it needs a card of 9 TiB")


def wrong(here):
    yield ROW | {"right": False}


def is_set(here):
    yield ROW | {"found": {"variable": os.environ.get("OF_THE_CASE")}}
