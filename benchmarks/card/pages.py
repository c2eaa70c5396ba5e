"""An optimizer's state that the card has no room for: its pages must leave, and come back for every step.

A filler takes what the card has free but for half of the state's size, before there is any state. The optimizer without
pages then runs out of memory. Where the one with pages steps all the same, and to the same bits, no step can have found
all of its state on the card. Then its state is saved and restored, which must page it again, and the filler goes.

What this does not show: whether a page was brought or was read over the link from where it lay, which CUDA decides;
and how fast it is beside other work. The seconds are told, not judged. On some machines a card hangs that has less room
than pages it is asked for, and with it all that comes after: so this runs on a card only where CROWD_THE_CARD=1 asks.
"""

import os
import time
from collections.abc import Mapping
from statistics import median

from benchmarks.card.case import Here, LeftOut
from lowmem.units import GIB

ASKED = "CROWD_THE_CARD"  # environment variable
STEPS = 4  # with the filler, and as many without it
MATRICES = 16
PAGED, UNPAGED = "optim=paged_adamw32bit", "optim._target_=bitsandbytes.optim.AdamW32bit"
FP32_STATE = 8  # bytes per parameter


def crowded(here: Here) -> dict:
    """Raises: LeftOut: it was not asked for; others hold the card."""
    if here.on_card and not os.environ.get(ASKED):
        raise LeftOut(f"a card that is asked for more pages than it has room for may hang: {ASKED}=1 asks for it")
    from lowmem import build

    make, make_unpaged = (build.optimizer(here.config(PAGED, *more)) for more in ((), (UNPAGED,)))
    model = begun(_model(here))
    unpaged = make_unpaged(model)
    found = {"state": here.size.state, "seconds unpaged": _steps(model, unpaged, range(2 * STEPS), here)}
    expected = _weights(model)
    del unpaged

    filler = _filler(here, leave=here.size.state // 2)
    if filler is not None:
        found["unpaged runs out of memory"] = _runs_out(begun(model), make_unpaged, here)
    optimizer = make(begun(model))
    found["seconds crowded"] = _steps(model, optimizer, range(STEPS), here)
    found |= {"paged": _is_paged(optimizer), "free": _free(here)}
    del filler
    here.release()

    restored = make(model)
    restored.load_state_dict(optimizer.state_dict())
    found |= {"paged when restored": _is_paged(restored), "same state": _same_state(optimizer, restored)}
    found["seconds with room"] = _steps(model, restored, range(STEPS, 2 * STEPS), here)
    found["same bits"] = _same(_weights(model), expected)
    return found | {"right": right(found, here.on_card)}


def right(found: Mapping, on_card: bool) -> bool:
    """Without CUDA nothing is paged, and nothing runs out."""
    asked = ("same bits", "same state")
    asked += ("unpaged runs out of memory", "paged", "paged when restored") if on_card else ()
    return all(found[what] is True for what in asked)


def _model(here: Here):
    """Of as many parameters as make the state; with gradients, so that later only state is allocated."""
    import torch
    from torch import nn

    side = round((here.size.state / FP32_STATE / MATRICES) ** 0.5)
    model = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(MATRICES))).to(here.device)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return model


def begun(model):
    """The same start for everyone."""
    import torch

    torch.manual_seed(0)
    for p in model.parameters():
        p.data.normal_()
    return model


def _steps(model, optimizer, numbers: range, here: Here) -> float:
    """With the gradients of these steps. Returns: seconds of one, the first aside."""
    import torch

    settled = torch.cuda.synchronize if here.on_card else lambda: None
    taken = []
    for number in numbers:
        torch.manual_seed(1 + number)
        for p in model.parameters():
            p.grad.normal_()
        settled()
        start = time.perf_counter()
        optimizer.step()
        settled()
        taken.append(time.perf_counter() - start)
    return median(taken[1:])


def _filler(here: Here, leave: int):
    """Raises: LeftOut: others hold the card."""
    import torch

    if not here.on_card:
        return None
    here.release()
    free = torch.cuda.mem_get_info()[0]
    if free < 2 * leave:
        raise LeftOut(f"of the card {free / GIB:.1f} GiB are free, and the state alone has {2 * leave / GIB:.1f}")
    return torch.empty(free - leave, dtype=torch.uint8, device=here.device)


def _runs_out(model, make, here: Here) -> bool:
    import torch

    try:
        make(model).step()
        return False
    except torch.OutOfMemoryError:
        return True
    finally:
        here.release()


def _free(here: Here) -> int | None:
    import torch

    return torch.cuda.mem_get_info()[0] if here.on_card else None


def _buffers(optimizer) -> list:
    return [state[key] for state in optimizer.state.values() for key in ("state1", "state2")]


def _is_paged(optimizer) -> bool:
    return all(getattr(buffer, "is_paged", False) for buffer in _buffers(optimizer))


def _same_state(one, other) -> bool:
    return _same(_buffers(one), _buffers(other))


def _weights(model) -> list:
    return [p.detach().cpu().clone() for p in model.parameters()]


def _same(some: list, others: list) -> bool:
    import torch

    return len(some) == len(others) and all(map(torch.equal, some, others))


def says(one: Mapping) -> str:
    """In a cell of a table."""
    seconds = ", ".join(f"{one[f'seconds {when}']:.4f} {when}" for when in ("crowded", "with room", "unpaged"))
    truths = ("same bits", "same state", "paged", "paged when restored", "unpaged runs out of memory")
    told = ", ".join(f"{what}: {'yes' if one[what] else 'NO'}" for what in truths if what in one)
    return f"{one['state'] / GIB:.2f} GiB with room for half of it; s per step: {seconds}; {told}"
