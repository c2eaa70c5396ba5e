"""Plans a run of train.py before it starts. `fit.py` calls this module, and `batch_size.py` calls `could_fit`.

    plan=auto, plan=12GiB    `with_recipe` chooses the fastest recipe that fits; then `checked` checks the chosen recipe
    plan=check               `checked` predicts the memory, and refuses a run that does not fit
    plan=off                 nothing is predicted

After an out-of-memory error, `smaller_recipe` searches for a recipe that needs less memory. In a run on several
devices, only rank 0 predicts the memory, and a search for recipes is refused.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from hydra.core.global_hydra import GlobalHydra

from lowmem.config import cards, drives
from lowmem.config.cards import Card
from lowmem.config.declarations import CHANGEABLE
from lowmem.config.settle import Run, run_of
from lowmem.config.typed_lines import as_mapping, replaced, without
from lowmem.plan import column
from lowmem.plan.cost import machine
from lowmem.plan.cost.step_time import of_trace
from lowmem.plan.prediction import NotPredicted, Prediction, predict
from lowmem.plan.search.candidates import Typed
from lowmem.plan.search.recipes import Plan, search
from lowmem.plan.table import command, on_drive
from lowmem.plan.target import Target
from lowmem.plan.tracing.elsewhere import trace_elsewhere
from lowmem.plan.tracing.traffic import NODE
from lowmem.report.metrics import LONG
from lowmem.system import process, rank_environment
from lowmem.system.errors import Refused
from lowmem.system.units import GIB, MIB, duration

log = logging.getLogger(__name__)

LESS = 0.9  # `smaller_recipe` accepts recipes that need at most this share of the predicted device memory


def with_recipe(run: Run, typed: Sequence[str]) -> Run:
    """For plan=auto and plan=<a card's name or size>, returns the run with the fastest recipe that fits. For plan=check
    and plan=off, returns the run unchanged. A recipe changes precision and optimizer only if may_change= names them,
    and keeps all other typed overrides.

    Raises:
        Refused: no recipe fits; `plan` is not the name or size of a card; the run was started from a notebook, where
            recipes cannot be searched; or `search` raises Refused.
    """
    if run.plan in ("check", "off"):
        return run
    card = _free(run) if run.plan == "auto" else cards.card(run.plan, "plan")
    may_change = run.may_change.split(",") if run.may_change else []
    typed = without(("plan", "may_change"), typed)
    plan = _searched(run.resolved(), typed, card, may_change)
    if plan.chosen is None:
        least = plan.recipes[0]
        others = [group for group in CHANGEABLE if group not in may_change]
        instead = f"may_change={','.join(CHANGEABLE)} to allow another {' or '.join(others)}, or " if others else ""
        typed_ones = f" with the typed {' and '.join(others)}" if others else ""
        drive, size = plan.target.drive, least.prediction.drive.total
        if drive is not None and size > drive.size:
            instead += f"a weights.drive= with {size / MIB:,.0f} MiB free (it has {drive.size / MIB:,.0f}), or "
        raise Refused(
            f"plan={run.plan}: no recipe fits{typed_ones}; the smallest one, {command(typed, least)}, needs "
            f"{least.prediction.device.total / GIB:.2f} GiB of device memory and "
            f"{least.prediction.host.total / GIB:.1f} GiB of host memory. Type {instead}a smaller seq_len or model."
        )
    log.info(
        f"plan={run.plan}: chose {' '.join(plan.chosen.overrides) or 'no changes'} ({plan.chosen.says}), the fastest "
        f"of {len(plan.fitting)} recipes that fit (of {len(plan.recipes)} considered). It needs "
        f"{plan.chosen.prediction.device.total / GIB:.2f} GiB of device memory."
    )
    return _composed(run, typed, as_mapping(plan.chosen.overrides))


def checked(run: Run, typed: Sequence[str]) -> Prediction | None:
    """Predicts the memory of a run, and logs advice. Returns None with plan=off, or if the model cannot be traced.

    Raises:
        Refused: train.py would refuse the run even with plan=off; or the run is predicted to need more memory than the
            device, the host or the drive has, and the prediction is not only an estimate. In the second case the
            message names a recipe that fits, if a search finds one.
    """
    if run.plan == "off":
        return None
    target = _target(run)
    try:
        prediction = _predicted(run, target)
    except NotPredicted as error:
        log.info(f"{error} This run starts without one.")
        return None
    if prediction.advice is not None:
        log.info(prediction.advice)
    if prediction.estimate is not None:
        log.info(f"The prediction is an estimate: {prediction.estimate}")
    elif not prediction.fits(target):
        raise Refused(_does_not_fit(run, typed, prediction, target))
    if prediction.drive.total:
        log.info(on_drive(prediction, target))
    return prediction


def smaller_recipe(run: Run, typed: Sequence[str], prediction: Prediction | None) -> str | None:
    """Returns advice for a run that ran out of device memory, although its memory had been predicted. The advice is the
    command of the fastest recipe that is predicted to need at least 10 % less device memory, or a sentence saying that
    no such recipe exists. None: the run's memory was not predicted, or the search failed."""
    if prediction is None:
        return None
    log.info("Out of memory: searching for a recipe that needs less memory ...")
    try:
        less = round(LESS * prediction.device.total)
        plan = _searched(run, typed, replace(_free(run) or Card(less, "a tenth less"), size=less))
    except Exception as error:  # an error of this search must not hide the out-of-memory error
        log.info(f"No recipe was found: {error}")
        return None
    predicted = f"{prediction.device.total / GIB:.2f} GiB"
    reason = f"The prediction was {predicted} of device memory: either the run used more, or less was free."
    if plan.chosen is None:
        return f"{reason} No recipe is predicted to need at least 10 % less: type a smaller seq_len or model."
    need = plan.chosen.prediction.device.total / GIB
    return (
        f"{reason} The fastest recipe that is predicted to need at least 10 % less, {need:.2f} GiB "
        f"({plan.chosen.says}):\n  " + command(typed, plan.chosen)
    )


def seconds_per_step(run: Run, prediction: Prediction) -> float | None:
    """Returns the estimated seconds of an optimizer step on this machine, from the machine's stored rates. None: the
    rates of the device or of the CPU are not stored, the run has several devices, `prediction` is only an estimate, or
    the time could not be estimated (the error is logged)."""
    on_card = run.device == "cuda"
    if prediction.estimate or prediction.devices > 1 or not all(map(machine.stored_rates, {on_card, False})):
        return None
    try:
        return of_trace(machine.machine(on_card, products=run.multiplies_in), run, prediction.trace).seconds
    except Exception as error:  # an error of the estimate must not end the run
        log.info(f"The time per step is not known: {error}")
        return None


def log_duration(steps: int, seconds: float) -> None:
    """Logs the estimated duration of a run if it exceeds LONG seconds. Args: steps: number of optimizer steps; seconds:
    seconds per step."""
    if steps * seconds > LONG:
        log.info(
            f"{steps} steps of about {seconds:.2g} s each take about {duration(steps * seconds)}, without evaluation."
        )


def could_fit(run: Run) -> bool:
    """Returns False if a run is predicted not to fit on this machine. Returns True if the run is predicted to fit, if
    the prediction is only an estimate, or if the model cannot be traced. Raises: Refused: see `predict`."""
    target = _target(run)
    try:
        prediction = _predicted(run.resolved(), target)
    except NotPredicted:
        return True
    return prediction.estimate is not None or prediction.fits(target)


def _predicted(run: Run, target: Target) -> Prediction:
    return predict(run, target, trace_elsewhere if run.several else None)


def _target(run: Run) -> Target:
    """Returns the device, host and drive of this process, with the memory and space that the run may use."""
    node = rank_environment.on_this_machine() if run.several else NODE
    return Target(run.device == "cuda", _free(run), _host(), node, drives.space(None, run.drive_folder))


def _free(run: Run) -> Card | None:
    """Returns a `Card` whose size is the free device memory, or memory.limit if this is smaller. For a CPU, the size is
    memory.limit. None: the device is a CPU and memory.limit is not set, so only the host's memory limits the run.

    Neither size includes the CUDA context: free memory is read when the context already exists, and memory.limit limits
    torch's allocator, which does not count the context.
    """
    limit = run.limit
    if run.device != "cuda":
        return limit and Card(limit, "memory.limit")
    card = cards.here()
    return card if limit is None else replace(card, size=min(card.size, limit))


def _host() -> int:
    """Returns the bytes of host memory that all ranks on this machine may use together: the free memory plus the memory
    that the ranks already use. Each rank is assumed to use the same amount as this process."""
    return process.available_bytes() + rank_environment.on_this_machine() * process.rss_bytes()


def _does_not_fit(run: Run, typed: Sequence[str], prediction: Prediction, target: Target) -> str:
    device, needs = prediction.device, prediction.drive.total
    rows = ", ".join(f"{column.LABELS[name]} {size / GIB:.2f}" for name, size in device.rows.items() if size)
    lines = [
        f"This run is predicted to need {device.total / GIB:.2f} GiB of device memory ({rows}; highest in "
        f"{device.phase}) and {prediction.host.total / GIB:.1f} GiB of host memory."
    ]
    if target.device_memory is not None:
        lines.append(f"The device has {target.device_memory / GIB:.2f} GiB free.")
    lines.append(f"The host has {target.host_memory / GIB:.1f} GiB.")
    if needs and needs > target.drive.size:
        lines.append(
            f"weights.drive={target.drive.folder} needs {needs / MIB:,.0f} MiB and has "
            f"{target.drive.size / MIB:,.0f} MiB free: type a folder on a drive with more space."
        )
    try:
        plan = _searched(run, typed, target.card)
        lines.append(
            f"The fastest recipe that fits ({plan.chosen.says}): {command(typed, plan.chosen)}."
            if plan.chosen
            else "No recipe fits."
        )
    except Refused as error:
        lines.append(str(error))
    return " ".join([*lines, "Type plan=off to start the run anyway."])


def _searched(run: Run, typed: Sequence[str], card: Card | None, may_change: Collection[str] | None = None) -> Plan:
    if not GlobalHydra.instance().is_initialized():
        raise Refused("Only the command line can search recipes: type python plan.py <overrides>.")
    typed_run = Typed(run, typed, lambda recipe: _composed(run, typed, recipe), may_change)
    return search(typed_run, replace(_target(run), card=card))


def _composed(run: Run, typed: Sequence[str], recipe: Mapping[str, str]) -> Run:
    """Returns the run of a recipe, with the output folder of `run`, and with the device of `run` instead of
    device=auto."""
    where = {"device": run.device, "output_dir": run.output_dir}
    return run_of(replaced(typed, recipe)).knowing(**where).resolved()
