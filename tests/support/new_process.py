"""Runs a test that measures memory in a new process.

Earlier tests leave a fragmented heap, whose gaps new tensors fill without increasing resident memory. Therefore a
measurement in a pytest worker would depend on the tests that the worker ran before.
"""

import functools
import importlib
import inspect
import traceback

import pytest


def in_a_new_process(test):
    """Decorator that runs a test in a new process. The test's arguments must be picklable, except `monkeypatch`, which
    is made in the new process."""
    parameters = inspect.signature(test).parameters

    @functools.wraps(test)
    def there(processes, **arguments):
        arguments.pop("monkeypatch", None)
        said, saying = processes.Pipe(duplex=False)
        process = processes.Process(target=_live, args=(saying, test.__module__, test.__name__, arguments))
        process.start()
        saying.close()
        try:
            failure = said.recv()
        except EOFError:
            failure = "it ended without a word"
        process.join()
        assert not failure, failure

    its = (inspect.Parameter("processes", inspect.Parameter.POSITIONAL_OR_KEYWORD), *parameters.values())
    there.__signature__ = inspect.Signature(its)  # pytest reads the names of fixtures from the signature
    return there


def _live(saying, module, name, arguments):
    test, failure = getattr(importlib.import_module(module), name).__wrapped__, ""
    with pytest.MonkeyPatch.context() as monkeypatch:
        own = {"monkeypatch": monkeypatch} if "monkeypatch" in inspect.signature(test).parameters else {}
        try:
            test(**arguments, **own)
        except BaseException:  # includes pytest's outcomes, such as a skip
            failure = traceback.format_exc()
    saying.send(failure)
