"""Builds the error message of a run that ran out of memory; `fit.py` raises the error.

The message suggests three kinds of overrides: techniques that declare `advised: true` in the yaml files of conf/ (at
most one technique of each group), a smaller batch_size, and a smaller seq_len. If host memory ran out, the only
techniques that are suggested are optimizers, and only if optimizer state is in host memory.
"""

from collections.abc import Mapping, Sequence

from lowmem.config.declarations import choice, groups, techniques
from lowmem.memory.ledger import Side
from lowmem.plan.column import LABELS
from lowmem.system.units import GIB


def out_of_memory(side: Side, held: Mapping[str, int], tries: Sequence[str], planned: str | None = None) -> str:
    """Returns the error message for a run that ran out of memory.

    Args:
        side: "device" or "host": the memory that ran out.
        held: category -> bytes. For the device, these are the bytes at the peak; for the host, the bytes when memory
            ran out.
        tries: the result of `advice`.
        planned: advice from the planner (`at_start.smaller_recipe`); None if there is none.
    """
    lines = [f"Out of memory on the {side}. Memory {'at the peak' if side == 'device' else 'in use'}, by category:"]
    lines += [f"  {LABELS[category]:<16}{size / GIB:8.3f} GiB" for category, size in held.items()]
    lines += [planned] if planned else []
    if side == "host":  # most techniques save device memory, and some need more host memory
        state = ("optim=",) if held.get("optimizer") else ()
        tries = [line for line in tries if line.startswith((*state, "batch_size=", "seq_len="))]
    return "\n".join([*lines, "Try these overrides, one at a time:", *(f"  {line}" for line in tries)])


def advice(choices: Mapping[str, str], batch_size: int, seq_len: int, windows: Mapping[int, int]) -> list[str]:
    """Returns overrides that save memory:

    - half the batch_size (if it is above 1), with twice as many micro-batches per optimizer step
    - half the seq_len
    - for each group except accumulation in which the run's technique saves no memory: the advised technique of this
      group, if there is one

    Args:
        choices: group -> technique of the run.
        batch_size, seq_len: settings of the run.
        windows: first optimizer step or epoch -> micro-batches per optimizer step from there on (`WindowSize.sizes`).
    """
    tries = []
    for group in groups():
        known = techniques(group)
        used, first = (
            known.get(choices.get(group)),
            next((name for name, technique in known.items() if technique.advised), None),
        )
        # a group without an advised technique, such as `weights`: streaming also needs changes in other groups, which
        # only the planner finds
        if first is None:
            continue
        if group != "accumulation":
            tries += [f"{group}={first}"] if used is None or not used.saves else []
        elif batch_size > 1:
            keys = () if used is None else choice(group, choices[group])
            more = f" accumulation={first} accumulation.batches={2 * windows[0]}"
            if "size" in keys:  # the number of micro-batches follows from batch_size
                more = ""
            elif "sizes" in keys:
                more = f" accumulation.sizes='{ {start: 2 * count for start, count in windows.items()} }'"
            tries.append(f"batch_size={batch_size // 2}{more}")
    return [*tries, f"seq_len={max(1, seq_len // 2)}"]
