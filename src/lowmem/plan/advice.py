"""Advises what to try when memory runs out: from each group the technique that declares itself the first to try."""

from collections.abc import Mapping

from lowmem.config.declarations import choice, groups, techniques
from lowmem.memory.ledger import Side
from lowmem.plan.column import LABELS
from lowmem.system.units import GIB


def out_of_memory(
    side: Side,
    held: Mapping[str, int],
    choices: Mapping[str, str],
    batch_size: int,
    seq_len: int,
    planned: str | None = None,
) -> str:
    """Returns the message of a run that did not fit.

    Args:
        side: whose memory ran out, device or host.
        held: bytes by category.
        choices: group -> what the run used.
        planned: what the plan says.
    """
    lines = [f"Out of memory on the {side}. Memory {'at the peak' if side == 'device' else 'in use'}, by category:"]
    lines += [f"  {LABELS[category]:<16}{size / GIB:8.3f} GiB" for category, size in held.items()]
    lines += [planned] if planned else []
    tries = advice(choices, batch_size, seq_len)
    if side == "host":  # other techniques save memory of the device, some of them by moving it to the host
        state = ("optim=",) if held.get("optimizer") else ()
        tries = [line for line in tries if line.startswith((*state, "batch_size=", "seq_len="))]
    return "\n".join([*lines, "Try these overrides, one at a time:", *(f"  {line}" for line in tries)])


def advice(choices: Mapping[str, str], batch_size: int, seq_len: int) -> list[str]:
    """Overrides that this run does not use yet, of the groups that save memory."""
    tries = []
    for group in groups():
        known = techniques(group)
        used, first = (
            known.get(choices.get(group)),
            next((name for name, technique in known.items() if technique.advised), None),
        )
        if first is None:  # it needs other choices beside it, which a plan makes
            continue
        if group != "accumulation":
            tries += [f"{group}={first}"] if used is None or not used.saves else []
        elif batch_size > 1:  # a smaller micro-batch, the same update
            keeps = used is not None and "size" in choice(group, choices[group])
            more = "" if keeps else f" accumulation={first} accumulation.batches=2"
            tries.append(f"batch_size={batch_size // 2}{more}")
    return [*tries, f"seq_len={max(1, seq_len // 2)}"]
