"""Memory is measured in a process that has computed nothing before. In a heap with holes, as other tests leave them,
tensors lie in these: they neither show when they are taken nor go back to the system when they are let go, so that what
is measured depends on which tests a worker happened to run first."""

import functools
import importlib
import inspect
import traceback

import pytest


def in_a_new_process(test):
    """Decorates a test: its arguments must pickle, but for `monkeypatch`, which it has there of its own."""
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
    there.__signature__ = inspect.Signature(its)  # what pytest reads to know which fixtures it wants
    return there


def _live(saying, module, name, arguments):
    test, failure = getattr(importlib.import_module(module), name).__wrapped__, ""
    with pytest.MonkeyPatch.context() as monkeypatch:
        own = {"monkeypatch": monkeypatch} if "monkeypatch" in inspect.signature(test).parameters else {}
        try:
            test(**arguments, **own)
        except BaseException:  # an assertion too
            failure = traceback.format_exc()
    saying.send(failure)
