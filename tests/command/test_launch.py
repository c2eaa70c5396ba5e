"""Tests runs of several ranks: which errors end all ranks, how such an error is reported, and that no process is left.

In most tests each rank runs a script of a few lines, without torch, in place of train.py; the last tests start
train.py.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from conftest import ROOT
from devices import CARDS
from lowmem.command import cli, folder_lock, launch
from lowmem.config import check
from lowmem.config.typed_lines import composed
from lowmem.report import folders
from lowmem.system import rank_environment, signals
from lowmem.system.errors import NotPublished, Refused
from lowmem.system.signals import Ended
from made_up import WATCHDOG

# The beginning of each stand-in for train.py: `rank`, `run` and helpers. `listens` installs signal handlers that only
# record the signal, as in a run; the code of the test then stops the rank.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {src!r})
from lowmem.system import rank_environment as launched
launched.leashed()
rank, run = launched.number(), launched.of_run()
told = []
(run / f"pid-{{rank}}").write_text(str(os.getpid()))
def listens():
    for sent in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(sent, lambda number, _: told.append(number))
    (run / f"listens-{{rank}}").touch()
def together(what, seconds=20):
    end = time.monotonic() + seconds
    while not all((run / f"{{what}}-{{r}}").exists() for r in range(launched.size())) and time.monotonic() < end:
        time.sleep(0.01)
def fails(how, said):
    launched.report(how, said)
    sys.exit(said if launched.says(said) else 1)
def stops():
    launched.report("interrupted", signal.Signals(told[0]).name)
    sys.exit(128 + told[0])
"""


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Yields a function that takes the code that every rank runs and the number of ranks, starts the ranks with
    `launch.run`, and returns the result. Checks at the end that no rank is alive."""
    monkeypatch.setattr(launch.sweep, "script", tmp_path / "train.py")
    monkeypatch.setattr(launch, "SETTLE", 0.3)
    monkeypatch.setattr(launch, "GRACE", 0.5)
    run = tmp_path / "run"
    run.mkdir()

    def start(does: str, size: int = 2):
        (tmp_path / "train.py").write_text(SCRIPT.format(src=str(ROOT / "src")) + does)
        with signals.handled(signals.at_once):
            return launch.run(run, ["lr=1"], size)

    start.run = run
    yield start
    assert not any(alive(int(file.read_text())) for file in run.glob("pid-*"))


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def message(ranks, does: str, size: int = 2) -> str:
    with pytest.raises(launch.RankEnded) as error:
        ranks(does, size)
    return str(error.value)


def meet(word: str) -> str:
    """Returns code that waits for all ranks, because ranks start seconds apart on a busy machine."""
    return f"(run / f'{word}-{{rank}}').touch()\ntogether('{word}')\n"


@pytest.mark.process
def test_each_of_three_ranks_has_its_environment_overrides_and_output_log(ranks, capfd):
    keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    does = f"print(*(os.environ[key] for key in {keys}), *sys.argv[1:])"
    assert ranks(does, 3) is None
    said = [capfd.readouterr().out, *((ranks.run / f"rank-{r}" / "output.log").read_text() for r in (1, 2))]
    words = [line.split() for line in said]
    assert [one[:5] for one in words] == [[str(r), str(r), "3", "3", "127.0.0.1"] for r in range(3)]
    assert all(one[5:] == [*words[0][5:7], "lr=1", f"hydra.run.dir={ranks.run}"] for one in words)
    assert int(words[0][5]) > 1023 and int(words[0][6]) >= 1


@pytest.mark.process
@pytest.mark.parametrize(
    ("end", "says"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL (the host may have run out of memory"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("os._exit(7)", "exit code 7"),
    ],
)
def test_dead_rank_ends_the_other_ranks_and_is_reported_with_its_last_lines(ranks, end, says):
    """The other rank ignores signals and does not end, like a rank that waits in a collective."""
    began = time.monotonic()
    said = message(
        ranks,
        "[signal.signal(s, signal.SIG_IGN) for s in (signal.SIGTERM, signal.SIGINT)]\n"
        "if rank == 0: print('of rank 0', flush=True); time.sleep(60)\n"
        f"print('first\\n\\nlast words', flush=True); {end}",
    )
    assert time.monotonic() - began < 20
    log = ranks.run / "rank-1" / "output.log"
    assert (
        said.startswith(f"Rank 1 of 2: {says}")
        and f"\nIts last lines of output ({log}):\n  first\n  last words\n" in said
    )
    assert "no checkpoint yet. Type the same command again" in said and "rank 0" not in said
    assert (ranks.run / folders.FAILED).read_text() == said + "\n"


@pytest.mark.process
def test_error_of_a_dead_rank_suggests_resume_if_a_checkpoint_exists(ranks):
    (ranks.run / "checkpoints").mkdir()
    (ranks.run / "checkpoints" / "step-00000002.ckpt").touch()
    said = message(ranks, "if rank: time.sleep(60)\nos.kill(os.getpid(), 9)")
    assert f"Add resume=auto hydra.run.dir={ranks.run} to the same command" in said


@pytest.mark.process
def test_error_of_rank_0_quotes_the_last_lines_of_train_log(ranks):
    said = message(ranks, "if rank: time.sleep(60)\n(run / 'train.log').write_text('step 3')\nos.kill(os.getpid(), 9)")
    assert "Rank 0 of 2: killed by SIGKILL" in said and f"({ranks.run / 'train.log'}):\n  step 3\n" in said


@pytest.mark.process
def test_error_reports_the_rank_that_failed_first_and_not_the_lost_connections(ranks):
    """Rank 0 reports a closed connection before the launcher notices that rank 1 has failed; rank 2 aborts. Rank 1 is
    killed in the first run, and raises an error in the second."""
    launch.SETTLE = 2.0  # the fixture restores the value
    lost = "if rank == 0: fails('lost', 'all_reduce in total: another rank has exited.')\n"
    lost += "if rank == 2: os.abort()\ntime.sleep(0.15)\n"
    said = message(ranks, meet("once") + lost + "os.kill(os.getpid(), signal.SIGKILL)", 3)
    assert said.startswith("Rank 1 of 3: killed by SIGKILL")
    trace = "Traceback (most recent call last):\\n  line 3\\nZeroDivisionError: a bug"
    said = message(ranks, meet("again") + lost + f"fails('failed', '{trace}')", 3)
    assert said.startswith("Rank 1 of 3: ZeroDivisionError: a bug\nIts last lines") and "\n    line 3\n" in said
    assert "another rank has exited" not in said


@pytest.mark.process
def test_abort_of_a_rank_after_it_reported_done_does_not_fail_the_run(ranks):
    assert ranks("launched.report('done')\nif rank == 0: os.abort()") is None
    assert message(ranks, "if rank == 0: os.abort()").startswith("Rank 0 of 2: killed by SIGABRT")


@pytest.mark.process
def test_launcher_error_is_only_the_report_of_a_rank_that_lost_a_collective_while_the_other_rank_hangs(ranks):
    said = message(
        ranks, "if rank == 1: time.sleep(60)\nfails('lost', 'all_reduce in total: another rank did not ...')"
    )
    assert said == "Rank 0 of 2: all_reduce in total: another rank did not ..."


@pytest.mark.process
def test_error_of_a_rank_aborted_by_the_nccl_watchdog_names_the_collective(ranks, capfd):
    """Output of rank 0 goes to the terminal, and output of rank 1 to its log. The watchdog's message is followed by 50
    further lines. If several ranks were aborted, the error names the rank that printed the message."""
    aborts = f"print({WATCHDOG!r}, *['a frame'] * 50, sep='\\n', file=sys.stderr, flush=True); os.abort()"
    for number in (0, 1):
        first = f"if rank != {number}: os.abort()\n" if number else f"if rank != {number}: time.sleep(60)\n"
        said = message(ranks, first + aborts)
        assert said.startswith(f"Rank {number} of 2: allreduce: another rank did not answer in time"), said
        assert (WATCHDOG in capfd.readouterr().err) == (number == 0)


@pytest.mark.process
def test_failed_rank_that_does_not_exit_ends_all_ranks(ranks, monkeypatch):
    monkeypatch.setattr(launch, "LEAVES", 1.0)
    began = time.monotonic()
    said = message(
        ranks, "if rank == 1: launched.report('failed', 'a bug')\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(60)"
    )
    assert said == "Rank 1 of 2: a bug" and time.monotonic() - began < 20


@pytest.mark.process
def test_failed_rank_gets_time_to_finish_its_cleanup(ranks):
    said = message(
        ranks, "if rank == 0: time.sleep(60)\nlaunched.report('failed', 'a bug')\ntime.sleep(2)\n(run / 'left').touch()"
    )
    assert said == "Rank 1 of 2: a bug" and (ranks.run / "left").exists()


@pytest.mark.process
def test_refusal_by_all_ranks_is_reported_once_and_refusal_by_one_rank_names_the_rank(ranks, capfd):
    sentence = "lr=-1: give a positive learning rate."
    assert message(ranks, meet("here") + f"fails('failed', '{sentence}')", 3) == sentence
    assert capfd.readouterr() == ("", "") and not (ranks.run / folders.FAILED).exists()
    said = message(ranks, f"rank == 1 and fails('failed', '{sentence}')\ntime.sleep(60)", 3)
    assert said == f"Rank 1 of 3: {sentence}"


@pytest.mark.process
def test_failed_upload_of_rank_0_does_not_mark_a_complete_run_as_failed(ranks):
    with pytest.raises(NotPublished, match=r"^push=me/it: no network$"):
        ranks("if rank == 0: fails('not uploaded', 'push=me/it: no network')\nlaunched.report('done')")
    assert not (ranks.run / folders.FAILED).exists()


def signalled(ranks, *names: str, to=None, apart: float = 0.4) -> None:
    """Starts a thread that sends signals once two ranks have signal handlers. Args: names: names of the signals; to: a
    rank, or None for this process; apart: seconds to wait after each signal."""

    def send() -> None:
        while len([*ranks.run.glob("listens-*")]) < 2:
            time.sleep(0.01)
        target = os.getpid() if to is None else int((ranks.run / f"pid-{to}").read_text())
        for name in names:
            os.kill(target, signal.Signals[name])
            time.sleep(apart)

    threading.Thread(target=send, daemon=True).start()


@pytest.mark.process
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_signal_sent_twice_at_once_is_forwarded_once_to_all_ranks_and_is_the_result_of_the_run(ranks, name):
    signalled(ranks, name, name, apart=0.0)  # twice at once, as from a terminal to the whole process group
    does = "listens()\nwhile not told: time.sleep(0.01)\ntime.sleep(0.4)\n"
    sent = ranks(does + "(run / f'told-{rank}').write_text(str(told))\nstops()")
    assert sent == signal.Signals[name]
    assert [(ranks.run / f"told-{rank}").read_text() for rank in (0, 1)] == [f"[{sent.value}]"] * 2


@pytest.mark.process
def test_second_signal_ends_all_ranks_including_one_that_ignores_signals(ranks):
    signalled(ranks, "SIGTERM", "SIGTERM")
    began = time.monotonic()
    with pytest.raises(Ended) as ended:
        ranks("listens()\nwhile rank or len(told) < 2: time.sleep(0.01)\nfails('ended', 'SIGTERM: ended at once.')")
    assert ended.value.code == 143 and "second signal" in ended.value.said and time.monotonic() - began < 20


@pytest.mark.process
def test_signal_sent_to_one_rank_stops_all_ranks_and_is_the_result_of_the_run(ranks):
    signalled(ranks, "SIGTERM", to=1)
    does = "listens()\ntogether('listens')\nwhile not told and not (run / 'told').exists(): time.sleep(0.01)\n"
    assert ranks(does + "(run / 'told').touch()\ntold = told or [15]\nstops()") == signal.SIGTERM


@pytest.mark.process
def test_launcher_reports_ended_at_once_if_ranks_exit_on_a_signal_without_a_report(ranks):
    signalled(ranks, "SIGHUP")
    with pytest.raises(Ended) as ended:
        ranks("listens()\nwhile not told: time.sleep(0.01)\nsys.exit(129)")
    assert ended.value.code == 129 and ended.value.said == "SIGHUP: ended at once."


def test_first_rank_of_three_is_started_with_the_overrides_and_the_run_folder(tmp_path, monkeypatch):
    """A stand-in for `_rank` starts no process, and raises an exception that contains the arguments."""

    class Started(Exception):
        pass

    def rank(number, command, world, folder):
        raise Started(number, command, world["WORLD_SIZE"], folder)

    monkeypatch.setattr(launch, "_rank", rank)
    with pytest.raises(Started) as started:
        launch.run(tmp_path, ["lr=1", "precision='16'"], 3)
    command = [sys.executable, str(launch.sweep.script), "lr=1", "precision='16'", f"hydra.run.dir={tmp_path}"]
    assert started.value.args == (0, command, 3, tmp_path)


@pytest.mark.seam
@pytest.mark.process
def test_ranks_end_when_their_launcher_is_killed_even_if_one_ignores_sigterm(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "train.py").write_text(
        SCRIPT.format(src=str(ROOT / "src"))
        + "launched.ORPHANED = 0.3\nlistens()\nwhile rank or not told: time.sleep(0.01)"
    )
    code = (
        "from pathlib import Path; from lowmem.command import launch;"
        f"launch.sweep.script = Path('{tmp_path}/train.py'); launch.run(Path('{run}'), [], 2)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT / "src")})
    until(lambda: len([*run.glob("listens-*")]) == 2)
    pids = [int(file.read_text()) for file in run.glob("pid-*")]
    parent.kill()
    parent.wait()
    until(lambda: not any(map(alive, pids)), 10)  # rank 0 ends on SIGTERM; rank 1 ignores SIGTERM and is killed


def until(what, seconds=60) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


# --- environment variables of a rank ---------------------------------------------------------------------------------


@pytest.fixture
def place(monkeypatch):
    """Removes variables of a rank, such as RANK and WORLD_SIZE, from this process's environment. Returns a function
    that sets environment variables."""
    for key in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "SLURM_STEP_NUM_TASKS",
        rank_environment.OF_RUN,
        rank_environment.REPORTS,
    ):
        monkeypatch.delenv(key, raising=False)
    return lambda **env: [monkeypatch.setenv(key, value) for key, value in env.items()]


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"RANK": "1", "WORLD_SIZE": "4"}, "devices=2: 4 processes were started (WORLD_SIZE=4). Type devices=4"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x: this is not a number. Start ranks with torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "unset RANK and WORLD_SIZE"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, "devices=2: SLURM started 2 tasks (SLURM_STEP_NUM_TASKS)"),
        (
            {"SLURM_STEP_NUM_TASKS": "2"},
            "srun torchrun --nnodes=<nodes> --nproc-per-node=<ranks per node> ... train.py devices=2",
        ),
    ],
)
def test_invalid_rank_variables_of_torchrun_or_slurm_are_refused_with_advice(place, env, says):
    """Hydra turns an exception of a callback into a warning, so the callback exits."""
    place(**env)
    with pytest.raises(SystemExit) as ended:
        cli.Settle().on_run_start(composed(["strategy=ddp", "devices=2"], whole=True))
    assert says in ended.value.code


@pytest.mark.parametrize(
    "env",
    [{}, {"RANK": "1", "WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "2"}, {"SLURM_STEP_NUM_TASKS": "1"}],
    ids=["none", "two ranks", "one task"],
)
def test_missing_or_matching_rank_variables_of_torchrun_or_slurm_are_accepted(place, env, monkeypatch):
    place(**env)
    monkeypatch.setattr(cli.Settle, "run", None)
    cli.Settle().on_run_start(composed(["strategy=ddp", "devices=2"], whole=True))
    assert cli.Settle.run.devices == 2


def test_sweep_started_by_torchrun_is_refused(place):
    place(RANK="0", WORLD_SIZE="2")
    with pytest.raises(Refused, match=r"each would run the whole sweep. Type python train.py -m ... devices=2"):
        cli.prepare(["-m", "strategy=ddp", "devices=2", "seed=1,2"])


@pytest.mark.parametrize(("device", "ranks"), [("auto", 3), ("cuda", 3), ("cpu", 3), ("cuda", 2)])
def test_more_local_ranks_than_cuda_devices_are_refused_unless_the_run_uses_the_cpu(place, monkeypatch, device, ranks):
    """Of the 8 ranks, only those on this machine (LOCAL_WORLD_SIZE) share its CUDA devices."""
    place(RANK="0", WORLD_SIZE="8", LOCAL_WORLD_SIZE=str(ranks), LOCAL_RANK="0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    if device == "cpu" or ranks == 2:
        check._device(device, snapshot=False)
    else:
        with pytest.raises(Refused, match=r"devices=8: 3 of these ranks .* has 2 CUDA devices, .* Type devices=2, or"):
            check._device(device, snapshot=False)


def test_several_ranks_on_one_machine_without_local_rank_are_refused(place, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    place(RANK="1", WORLD_SIZE="2")
    with pytest.raises(Refused, match="LOCAL_RANK is not set, so all 2 ranks on this machine would use its first"):
        check._device("cuda", snapshot=False)


def test_restarted_torchrun_ranks_do_not_read_store_keys_of_the_previous_attempt(place):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
    place(TORCHELASTIC_USE_AGENT_STORE="True")
    for life in ("0", "1"):
        place(TORCHELASTIC_RESTART_COUNT=life)
        rank_environment._store.cache_clear()
        assert not rank_environment._store().check(["folder"])
        rank_environment._store().set("folder", life)
    rank_environment._store.cache_clear()


@pytest.mark.parametrize("env", [{}, {"RANK": "0", "WORLD_SIZE": "2"}])
def test_show_drops_strategy_and_devices_overrides_but_export_null_keeps_them(place, env):
    place(**env)
    assert cli.prepare(["show=3", "strategy=ddp", "strategy.timeout=9", "devices=2"]) == ["show=3"]
    assert cli.prepare(["export=null", "strategy=ddp", "devices=2"])[1:] == ["strategy=ddp", "devices=2"]


def test_rank_folders_are_not_listed_as_runs(tmp_path):
    run = tmp_path / "run"
    for folder in (run, run / "rank-1"):
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text("step\n1\n")
    (run / "rank-1" / "output.log").write_text("step 1\n")
    (run / "summary.json").write_text(json.dumps({"interrupted": False, "overrides": []}))
    assert [one.folder for one in folders.runs_below(tmp_path)] == [run]


HYDRAS = """
hydra: {run: {dir: RUN}, output_subdir: .hydra, overrides: {hydra: ["hydra.run.dir=RUN"]},
  job_logging: {handlers: {file: {filename: RUN/train.log}}}}
"""


@pytest.mark.parametrize(("number", "file"), [(0, "train.log"), (1, None)])
def test_rank_uses_the_folder_of_its_launcher_and_writes_no_hydra_files_or_second_log(
    place, tmp_path, monkeypatch, number, file
):
    (tmp_path / "summary.json").touch()  # another run's folder, which a command would refuse
    place(RANK=str(number), WORLD_SIZE="2", LOWMEM_RANK_OF=str(tmp_path))
    config = OmegaConf.create(HYDRAS.replace("RUN", str(tmp_path)))
    monkeypatch.setattr(folder_lock.Claim, "now", None)
    monkeypatch.setattr(HydraConfig, "set_config", lambda *_: None)  # Hydra did not create this config
    folder_lock.Claim().on_run_start(config)
    assert (config.hydra.run.dir, config.hydra.output_subdir) == (str(tmp_path), None)
    assert config.hydra.job_logging.handlers.file.filename == (str(tmp_path / file) if file else os.devnull)
    assert folder_lock.Claim.now is None  # the launcher holds the lock


@pytest.mark.parametrize("earlier", [None, "of an earlier life"])
def test_refused_multi_rank_run_leaves_the_folder_unchanged(tmp_path, monkeypatch, earlier):
    log = tmp_path / "run" / "rank-1" / "output.log"
    if earlier:
        log.parent.mkdir(parents=True)
        log.write_text(earlier)
    claimed = folder_lock._this(tmp_path / "run", "hydra.run.dir", lambda: True)
    log.parent.mkdir(exist_ok=True)
    log.write_text("lr=-1: give a positive learning rate.")
    assert claimed.untouched()
    claimed.give_back()
    assert log.exists() == bool(earlier) == (tmp_path / "run").exists()
    assert not earlier or log.read_text() == earlier


def test_folder_in_which_rank_1_has_written_metrics_counts_as_used(tmp_path):
    claimed = folder_lock._this(tmp_path / "run", "hydra.run.dir", lambda: True)
    (tmp_path / "run" / "rank-1").mkdir()
    (tmp_path / "run" / "rank-1" / "metrics.csv").touch()
    assert not claimed.untouched()


# --- real commands -------------------------------------------------------------------------------------------------


@pytest.fixture
def typed(small, tmp_path):
    """Yields a function that takes the arguments of a command, starts the command, and returns its process. The output
    is in the file `said`. Kills the processes at the end, and checks that no rank is alive."""
    started = []

    def start(*arguments: str, with_=(), **env: str) -> subprocess.Popen:
        run = () if "-m" in arguments else (f"hydra.run.dir={tmp_path}/run",)
        command = [sys.executable, *with_, "train.py", *small, "strategy=ddp", "devices=2", *run, *arguments]
        out = (tmp_path / "said").open("w")
        env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"} | env
        started.append(subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, env=env))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
    assert not of_run(tmp_path / "run")


def of_run(run: Path) -> list[int]:
    """Returns the process ids of the ranks of this run that are alive, ordered by rank."""
    found = {}
    for one in Path("/proc").glob("[0-9]*"):
        try:
            env = dict(line.split("=", 1) for line in (one / "environ").read_text().split("\0") if "=" in line)
        except (OSError, UnicodeDecodeError):
            continue
        if env.get(rank_environment.OF_RUN) == str(run) and alive(int(one.name)):
            found[env["RANK"]] = int(one.name)
    return [found[rank] for rank in sorted(found)]


@pytest.mark.process
def test_config_refused_by_every_rank_is_reported_once_and_leaves_no_folder(typed, tmp_path):
    assert typed("optim.in_backward=true", "clip=null").wait(120) == 1
    said = (tmp_path / "said").read_text()
    assert said.count("optim.in_backward=true: a parameter would be updated") == 1 == len(said.splitlines())
    assert not (tmp_path / "run").exists()


LONG = ("max_steps=100000", "save_every=20")


def at_step(run: Path, step: int, process: subprocess.Popen) -> None:
    until(lambda: process.poll() is not None or (run / "checkpoints" / f"step-{step:08d}.ckpt").exists(), 120)
    assert process.poll() is None, (run.parent / "said").read_text()


@pytest.mark.process
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank_fails_the_run_and_resume_auto_completes_it(typed, tmp_path, rank):
    run = tmp_path / "run"
    process = typed(*LONG)
    at_step(run, 20, process)
    os.kill(of_run(run)[rank], signal.SIGKILL)
    assert process.wait(20) == 1
    assert f"Rank {rank} of 2: killed by SIGKILL" in (tmp_path / "said").read_text()
    assert folders.load(run).status == "failed" and f"Rank {rank} of 2" in folders.load(run).reason
    assert typed("resume=auto", "max_steps=60", "save_every=20", "lr=1e-4").wait(120) == 0, (
        tmp_path / "said"
    ).read_text()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 60 and summary["resumed_from"] and folders.load(run).status == "done"


@pytest.mark.process
@pytest.mark.parametrize(("name", "to"), [("SIGTERM", None), ("SIGINT", None), ("SIGHUP", 0), ("SIGTERM", 1)])
def test_signal_to_the_launcher_or_a_rank_stops_the_run_with_a_checkpoint(typed, tmp_path, name, to):
    run = tmp_path / "run"
    process = typed(*LONG)
    at_step(run, 20, process)
    os.kill(process.pid if to is None else of_run(run)[to], signal.Signals[name])
    assert process.wait(30) == 128 + signal.Signals[name]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["interrupted"] and summary["signal"] == name and not (run / folders.FAILED).exists()
    assert (run / "checkpoints" / f"step-{summary['steps']:08d}.ckpt").exists()
    assert "Traceback" not in (tmp_path / "said").read_text()


@pytest.mark.process
@pytest.mark.parametrize("device", ["cpu", CARDS])
def test_hung_rank_ends_the_run_at_the_timeout_and_names_the_collective(typed, tmp_path, device):
    run = tmp_path / "run"
    # on a busy machine one rank may start some seconds before the other
    process = typed(*LONG, "strategy.timeout=20", f"device={device}")
    at_step(run, 20, process)
    os.kill(of_run(run)[1], signal.SIGSTOP)
    assert process.wait(90) == 1
    said = (tmp_path / "said").read_text()
    assert re.search(r"Rank 0 of 2: .*did not answer (in time|within 20)", said) and "strategy.timeout=" in said, said
    if device == "cuda":  # NCCL's watchdog ends the rank and prints a C++ stack
        return
    # Rank 0 waits in a collective of DDP's backward pass, or in a collective between two steps.
    collective = r"(backward's all_reduce of gradients|all_reduce|all_gather|broadcast)"
    assert re.search(rf"Rank 0 of 2: {collective} in \w+ \(\w+\.py:\d+\)", said), said
    assert "Traceback" not in said


@pytest.mark.process
def test_ranks_of_a_killed_launcher_end_and_record_sigterm_in_the_summary(typed, tmp_path):
    run = tmp_path / "run"
    process = typed(*LONG)
    at_step(run, 20, process)
    process.kill()
    until(lambda: not of_run(run), 30)
    assert json.loads((run / "summary.json").read_text())["signal"] == "SIGTERM"


@pytest.mark.process
def test_sweep_of_multi_rank_jobs_has_one_folder_per_job(typed, tmp_path):
    process = typed("-m", "seed=1,2", f"hydra.sweep.dir={tmp_path}/sweep", "max_steps=2")
    assert process.wait(240) == 0, (tmp_path / "said").read_text()
    assert [one.folder.name for one in folders.runs_below(tmp_path / "sweep")] == ["0", "1"]
    assert all((tmp_path / "sweep" / job / "rank-1" / "output.log").exists() for job in "01")


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node")


@pytest.mark.process
def test_torchrun_creates_one_run_folder_and_reports_a_shared_refusal_once(typed, tmp_path):
    assert typed("max_steps=2", with_=(*TORCHRUN, "2")).wait(120) == 0, (tmp_path / "said").read_text()
    run = tmp_path / "run"
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    assert (run / "rank-1" / "output.log").read_text() and not (run / "rank-1" / ".hydra").exists()
    assert typed("max_steps=2", with_=(*TORCHRUN, "2")).wait(120) == 1  # another run is in the folder
    assert (tmp_path / "said").read_text().count("another run is in this folder") == 1


@pytest.mark.process
def test_two_torchrun_agents_with_one_rank_each_train_one_run_of_two_ranks(typed, tmp_path):
    """Stands for `srun torchrun`, which starts one agent on each of two nodes."""
    where = f"--rdzv-endpoint=127.0.0.1:{launch.free_port()}"
    agents = (
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        "--rdzv-id=7",
        where,
    )
    first, second = (typed("max_steps=2", with_=agents) for _ in range(2))
    assert (first.wait(120), second.wait(120)) == (0, 0), (tmp_path / "said").read_text()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2
    assert (tmp_path / "run" / "rank-1" / "metrics.csv").exists()
