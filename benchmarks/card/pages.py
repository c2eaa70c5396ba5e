"""Tests paged optimizer state on a card that has no room for it: its pages must leave and come back at every step.

Before the optimizer has any state, a filler takes all free memory of the card except half of the state's size. The
optimizer without pages then runs out of memory. If the paged optimizer still steps, and its weights are equal bit for
bit, then no step can have had all of its state on the card. Then the state is saved and restored, which must page it
again, and the filler is freed.

This does not show whether a page was moved or was read over the link, which CUDA decides, nor how fast paging is while
other work runs. The seconds are reported and not judged. On some machines a card hangs when it has less room than the
pages need, and everything after it hangs too, so this runs on a card only with CROWD_THE_CARD=1.
"""

import os
import time
from collections.abc import Mapping
from statistics import median

from benchmarks.card.case import Here, LeftOut
from lowmem.system.units import GIB

ASKED = "CROWD_THE_CARD"  # environment variable
STEPS = 4  # steps with the filler, and the same number without it
MATRICES = 16
PAGED, UNPAGED = "optim=paged_adamw32bit", "optim._target_=bitsandbytes.optim.AdamW32bit"
FP32_STATE = 8  # bytes per parameter


def crowded(here: Here) -> dict:
    """Returns the seconds per step, the checks and `right`.

    Raises:
        LeftOut: CROWD_THE_CARD is not set, or other processes use the card's memory.
    """
    if here.on_card and not os.environ.get(ASKED):
        raise LeftOut(f"a card that is asked for more pages than it has room for may hang: {ASKED}=1 asks for it")
    from lowmem.training import build

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
    """Returns whether all checks hold; without CUDA nothing is paged and no memory runs out, so those are not asked."""
    asked = ("same bits", "same state")
    asked += ("unpaged runs out of memory", "paged", "paged when restored") if on_card else ()
    return all(found[what] is True for what in asked)


def _model(here: Here):
    """Returns a model whose optimizer state has the wanted size, and whose gradients exist already."""
    import torch
    from torch import nn

    side = round((here.size.state / FP32_STATE / MATRICES) ** 0.5)
    model = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(MATRICES))).to(here.device)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return model


def begun(model):
    """Returns the model with its initial weights, the same at every call."""
    import torch

    torch.manual_seed(0)
    for p in model.parameters():
        p.data.normal_()
    return model


def _steps(model, optimizer, numbers: range, here: Here) -> float:
    """Steps with the gradients of these step numbers. Returns the median seconds of a step, without the initial one."""
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
    """Allocates the card's free memory except `leave` bytes.

    Raises:
        LeftOut: other processes use the card's memory.
    """
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
    """Returns a result in one line, for a cell of a table."""
    seconds = ", ".join(f"{one[f'seconds {when}']:.4f} {when}" for when in ("crowded", "with room", "unpaged"))
    truths = ("same bits", "same state", "paged", "paged when restored", "unpaged runs out of memory")
    told = ", ".join(f"{what}: {'yes' if one[what] else 'NO'}" for what in truths if what in one)
    return f"{one['state'] / GIB:.2f} GiB with room for half of it; s per step: {seconds}; {told}"
