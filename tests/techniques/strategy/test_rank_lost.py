"""Tests the messages for errors of torch.distributed: they name the collective, say whether another rank has exited or
has not answered, and say what to type."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from lowmem.system.errors import RankLost
from lowmem.techniques.strategy import lost_ranks
from made_up import WATCHDOG

# Messages of torch 2.13 with gloo: rank 1 of two was killed (CLOSED, RESET), slept or never joined, or the port was
# taken.
CLOSED = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:10121."
RESET = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:8835: Connection reset by peer"
)
SILENT = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation"
)
NOBODY = "Timed out after 5 seconds waiting for clients. 1/2 clients joined."
TAKEN = "The server socket has failed to listen on any local network address. port: 23998, code: -98, name: EADDRINUSE"


def raised(path: str, names: tuple[str, ...], error: Exception) -> Exception:
    """Returns the error with a traceback through functions with these names in a file with this path."""
    code = "".join(f"def {name}(*rest): rest[0](*rest[1:])\n" for name in dict.fromkeys(names))
    space: dict = {}
    exec(compile(code, path, "exec"), space)

    def fail(*_):
        raise error

    try:
        functions = [space[name] for name in names]
        functions[0](*functions[1:], fail)
    except type(error) as caught:
        return caught


TORCH = "/site/torch/distributed/distributed_c10d.py"


@pytest.mark.parametrize(
    ("names", "said", "sentence"),
    [
        (("wrapper", "all_reduce"), CLOSED, "all_reduce: another rank has exited."),
        (("broadcast_object_list", "wrapper", "broadcast"), RESET, "broadcast: another rank has exited."),
        (("all_gather_single", "_wait"), SILENT, "all_gather_single: another rank did not answer within 60 seconds"),
        (("barrier",), "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 100 ms", "barrier: another rank did not"),
    ],
)
def test_lost_rank_error_names_the_innermost_public_collective(names, said, sentence):
    lost = lost_ranks.rank_lost(raised(TORCH, names, RuntimeError(said)), 60)
    assert isinstance(lost, RankLost) and str(lost).startswith(sentence)
    assert ("strategy.timeout=<seconds>" in str(lost)) == ("has exited" not in str(lost))


def test_lost_rank_error_names_the_calling_function_or_backward():
    error = raised("/site/torch/autograd/graph.py", ("_engine_run_backward",), RuntimeError(CLOSED))
    assert str(lost_ranks.rank_lost(error, 60)) == "backward's all_reduce of gradients: another rank has exited."
    error = raised(f"{lost_ranks.OURS}/strategy/several.py", ("all_sum",), RuntimeError(CLOSED))
    assert str(lost_ranks.rank_lost(error, 60)).startswith(
        "A collective in all_sum (several.py:1): another rank has exited."
    )


def test_lost_rank_error_names_the_collective_if_torch_is_in_a_folder_called_lowmem():
    torch = "/home/lowmem/.venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
    error = raised(torch, ("all_reduce", "_wait"), RuntimeError(CLOSED))
    assert str(lost_ranks.rank_lost(error, 60)) == "all_reduce: another rank has exited."


@pytest.mark.parametrize(
    ("said", "sentence"), [(NOBODY, "Not all ranks joined the process group within 60"), (TAKEN, "port")]
)
def test_rendezvous_failure_is_explained_as_missing_ranks_or_as_a_taken_port(said, sentence):
    error = raised(
        "/site/torch/distributed/rendezvous.py", ("init_process_group", "rendezvous"), dist.DistStoreError(said)
    )
    assert sentence in str(lost_ranks.rank_lost(error, 60))


@pytest.mark.parametrize(
    "error", [ValueError(CLOSED), RuntimeError("CUDA out of memory"), TimeoutError("Timed out"), OSError("Broken pipe")]
)
def test_error_not_caused_by_another_rank_is_not_reported_as_a_lost_rank(error):
    assert lost_ranks.rank_lost(raised("/site/mine.py", ("step",), error), 60) is None


def test_lost_rank_is_recognized_behind_an_error_raised_during_cleanup():
    try:
        try:
            raise raised(TORCH, ("all_reduce",), RuntimeError(SILENT))
        finally:
            raise ValueError("while it was cleaned up")
    except ValueError as error:
        assert str(lost_ranks.rank_lost(error, 60)).startswith("all_reduce: another rank did not answer")


def test_nccl_watchdog_message_names_the_collective_that_timed_out():
    said = lost_ranks.watchdog_message(f"step 3\n{WATCHDOG}\nmore")
    assert said.startswith("allreduce: another rank did not answer in time")
    assert lost_ranks.watchdog_message("step 3\nSegmentation fault") is None


def test_real_rendezvous_timeout_is_explained_as_ranks_that_did_not_join(monkeypatch):
    for key, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(RuntimeError) as error:
        dist.init_process_group("gloo", timeout=timedelta(seconds=1))
    assert "joined the process group within 1 seconds" in str(lost_ranks.rank_lost(error.value, 1))
