"""Made-up stages of benchmarks/card, whose cases end in every way in which a case can end. No torch is needed."""

import os
import subprocess
import sys
import time

from benchmarks.card.case import Case, LeftOut


def well(here):
    assert os.environ["OF_THIS_CASE"] == "1"
    return {"device": here.device, "text": here.text.is_dir()}


def fails(here):
    raise ZeroDivisionError("at the second step")


def endless(here):
    """With a process of its own, which must not outlive it."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    here.keep({"child": child.pid})
    time.sleep(600)


def dies(here):
    """And leaves a process behind."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    here.keep({"half": True, "child": child.pid})
    os.abort()


def wrong(here):
    return {"right": False}


def left_out(here):
    raise LeftOut("bitsandbytes is not installed")


def cases(size):
    ways = {"well": well, "fails": fails, "endless": endless, "dies": dies, "left out": left_out, "wrong": wrong}
    limit, environment = 2.0 / size.patience, {"OF_THIS_CASE": "1"}
    return {name: Case(run, limit if run is endless else 60.0, "json", environment) for name, run in ways.items()}


def says(results):
    return f"results of {', '.join(results)}"


def table(results):
    return "\n".join(["| case | result |", "|---|---|", *(f"| {name} | {one} |" for name, one in results.items())])
