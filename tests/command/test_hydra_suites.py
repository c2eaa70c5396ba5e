"""Runs Hydra's own tests of launchers and sweepers, with this project's callbacks around each sweep. Tests of a
launcher that is not installed are skipped."""

from importlib.util import find_spec

import pytest
from hydra import version
from hydra.core.singleton import Singleton
from hydra.test_utils.launcher_common_tests import BatchedSweeperTestSuite, IntegrationTestSuite, LauncherTestSuite

from lowmem.command import folder_lock

pytestmark = [
    pytest.mark.process,  # the integration tests start scripts
    # Hydra warns about the behaviour of version 1.1, which `a_command` selects
    pytest.mark.filterwarnings("ignore:Future Hydra versions:UserWarning", "ignore:\\s*version_base"),
]

OURS = [
    f"+hydra.callbacks.{name}={{_target_:{target}}}"
    for name, target in {
        "typed": "lowmem.config.typed_lines.TypedWins",
        "claim": "lowmem.command.folder_lock.Claim",
        "report": "lowmem.command.sweep.Report",
    }.items()
]
LAUNCHERS = {
    "basic": None,
    "joblib": "hydra_plugins.hydra_joblib_launcher",
    "submitit_local": "hydra_plugins.hydra_submitit_launcher",
}


def is_there(package):
    try:
        return package is None or find_spec(package) is not None
    except ModuleNotFoundError:
        return False


THERE = [
    pytest.param(name, OURS, marks=[] if is_there(package) else pytest.mark.skip(reason=f"{package} is not installed"))
    for name, package in LAUNCHERS.items()
]


@pytest.fixture(autouse=True)
def a_command():
    """Makes each sweep a separate command, which releases its folder. Selects the behaviour of Hydra 1.1, because the
    apps of these tests do not request a version."""
    state = Singleton.get_state()
    version.setbase("1.1")
    yield
    folder_lock.release()
    Singleton.set_state(state)


@pytest.mark.parametrize(("launcher_name", "overrides"), THERE)
class TestLaunchers(LauncherTestSuite):
    pass


@pytest.mark.parametrize(
    ("launcher_name", "overrides"), [("basic", ["hydra/sweeper=basic", "hydra.sweeper.max_batch_size=2", *OURS])]
)
class TestBatches(BatchedSweeperTestSuite):
    pass


@pytest.mark.parametrize(
    ("task_launcher_cfg", "extra_flags"),
    [({}, ["-m", "hydra/launcher=basic", *OURS])],
)
class TestScripts(IntegrationTestSuite):
    pass
