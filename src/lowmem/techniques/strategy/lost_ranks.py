"""Converts torch.distributed's errors about a lost or silent rank into `RankLost`, which usually names the collective.

gloo and NCCL report only a closed socket, or a timeout in milliseconds. `process_group.py` calls `rank_lost`, which
reads the collective and its caller from the traceback. If NCCL's watchdog thread aborts the process, there is no
traceback. So the launcher parses the log output of the ranks (`watchdog_message`). The launcher does not import torch,
so this module does not import torch either.
"""

import re
import traceback
from pathlib import Path, PurePath

import lowmem
from lowmem.system.errors import RankLost

# frames in this folder are ours; a test for "lowmem" in the path would match a clone's .venv too
OURS = Path(lowmem.__file__).parent
OF_TORCH = "torch/distributed/"
GONE = r"Connection closed by peer|Connection reset by peer|Broken pipe|caused pair closure|Connection refused"
GONE += r"|remote process exited|Socket closed|recvBytes failed|sendBytes failed"
SILENT = r"[Tt]imed out|[Tt]ime ?out|failed to pass monitoredBarrier"
TAKEN = r"EADDRINUSE|address already in use"
JOINING = ("rendezvous", "init_process_group", "_join")  # functions that create the process group
WATCHDOG = re.compile(r"Watchdog caught collective operation timeout: \w+\(SeqNum=\d+, OpType=(\w+)")


def rank_lost(error: BaseException, timeout: object) -> RankLost | None:
    """Returns the error to raise in place of an error of torch.distributed. Returns None if neither the error nor an
    error in its chain of causes and contexts is such an error.

    Args:
        error: any error, for example an error that was raised while handling an error of torch.distributed.
        timeout: strategy.timeout, in seconds, for the message.
    """
    chain, seen = [error], {id(error)}
    while (before := chain[-1].__cause__ or chain[-1].__context__) and id(before) not in seen:
        chain.append(before)
        seen.add(id(before))
    return next(filter(None, (_lost(cause, timeout) for cause in reversed(chain))), None)


def _lost(error: BaseException, timeout: object) -> RankLost | None:
    message, frames = str(error), traceback.extract_tb(error.__traceback__)
    if not _is_of_torch(error, message, frames):
        return None
    if re.search(TAKEN, message):
        return RankLost(
            "Another program took the rendezvous port of the ranks before they could open it. Type the same command "
            "again."
        )
    if any(frame.name in JOINING for frame in frames):
        return RankLost(
            f"Not all ranks joined the process group within {timeout} seconds: at least one did not start or cannot be "
            "reached. If the ranks are slow to start, type a larger strategy.timeout=<seconds>; if you started a "
            "single process, unset RANK and WORLD_SIZE."
        )
    call = collective(frames)
    if re.search(SILENT, message):
        return RankLost(
            f"{call}: another rank did not answer within {timeout} seconds: it hangs, or runs different code. If it is "
            "only slow, type a larger strategy.timeout=<seconds>."
        )
    return RankLost(f"{call}: another rank has exited.")


def watchdog_message(words: str) -> str | None:
    """Returns an error message for a timeout that NCCL's watchdog has reported; None if the log output contains no such
    report. Args: words: log output."""
    if match := WATCHDOG.search(words):
        return (
            f"{match[1].lower()}: another rank did not answer in time: it hangs, or runs different code. If it is only "
            "slow, type a larger strategy.timeout=<seconds>."
        )
    return None


def collective(frames: traceback.StackSummary) -> str:
    """Returns the name of the innermost public function of torch.distributed in the traceback (or "A collective"),
    followed by the innermost function of lowmem with file and line. DDP's all-reduce runs inside the autograd engine,
    without a Python frame, so it is recognized by the frame that started backward."""
    names = [frame.name for frame in frames if _in_torch(frame) and _is_public(frame.name)]
    if names:
        call = names[-1]
    elif any(frame.name == "_engine_run_backward" for frame in frames):
        call = "backward's all_reduce of gradients"
    else:
        call = "A collective"
    ours = [frame for frame in frames if PurePath(frame.filename).is_relative_to(OURS)]
    return f"{call} in {ours[-1].name} ({PurePath(ours[-1].filename).name}:{ours[-1].lineno})" if ours else call


def _is_of_torch(error: BaseException, message: str, frames: traceback.StackSummary) -> bool:
    # DistError, or an error that derives from it
    if any(kind.__module__ == "torch.distributed" for kind in type(error).__mro__):
        return True
    if not isinstance(error, RuntimeError) or not re.search(f"{GONE}|{SILENT}|{TAKEN}", message):
        return False
    return "gloo" in message or "nccl" in message.lower() or any(map(_in_torch, frames))


def _in_torch(frame: traceback.FrameSummary) -> bool:
    return OF_TORCH in _path(frame)


def _is_public(name: str) -> bool:
    return not name.startswith(("_", "<")) and name not in ("wrapper", "wait", "wait_tensor", "forward")


def _path(frame: traceback.FrameSummary) -> str:
    return PurePath(frame.filename).as_posix()
