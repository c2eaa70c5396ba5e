"""Turns the loops around: all micro-batches of a window pass through a block before the next block comes.

Weights that stream cross the link twice per micro-batch, whatever a window has. Here they cross it twice per *window*,
and each block's gradient leaves once, complete: so with clip=null its masters step at once, and the host needs no
buffer for sums.

Each micro-batch runs the model's own forward pass and its own `backward()` in a thread of its own. Only one thread runs
at a time: each waits at a *barrier* before a block (its forward pre-hook, or the hook on the gradient of its output)
until all micro-batches have reached it, then each computes the block, in the order of the window.
Nothing of a model is recorded or taken apart, so whatever it computes between its blocks stays its own. What lies
between the last block and backward is run by one micro-batch after the other: the logits of one exist at a time.

It costs the boundaries of all micro-batches (`gradient_checkpointing=offload` keeps them in host memory), the sum of
one block's gradients on the device (4 bytes per parameter of it), and for a head that is tied to the embedding one
gradient per micro-batch. To switch threads takes some 20 microseconds. Source: RoundPipe, arXiv 2604.27085;
GreedySnake, arXiv 2512.17570.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context

import torch
from torch import Tensor, nn

from lowmem.memory.tracker import belongs
from lowmem.offload.copy_lanes import CARDS
from lowmem.offload.micro_batches import Generators
from lowmem.system.errors import Refused
from lowmem.system.torch_private import modes_of_this_thread

NAME = "micro-batch"  # of a thread
Barrier = tuple[str, int]  # (forward or backward, number of the block)
END: Barrier = ("end", 0)


class Ended(Exception):
    """Unwinds a micro-batch because another one has failed. It is an `Exception`: for no other does torch call the
    hooks that modules want called after errors."""


class ByLayer:
    """One window, whose micro-batches go through the blocks together.

    Args: runs: each computes one micro-batch; generators: of random numbers; enter: (number of a micro-batch, how many
    there are) is called when one begins to compute, or goes on.
    """

    def __init__(
        self, runs: Sequence[Callable[[], None]], generators: Generators, enter: Callable[[int, int], None]
    ) -> None:
        self.runs, self.generators, self.enter = runs, generators, enter
        self.current = 0  # the micro-batch whose thread runs
        self.sums: dict[nn.Parameter, Tensor] = {}  # of gradients, until the last micro-batch has added its own
        self._alive: list[int] = []  # micro-batches whose threads have not ended
        self._may_run = [threading.Semaphore(0) for _ in runs]
        self._all_ended = threading.Semaphore(0)
        self._reached: Barrier = END  # the barrier of this round, for micro-batches that have not ended
        # When generating, one micro-batch may end while others go on: texts have lengths of their own.
        self._end_alone = not torch.is_grad_enabled()
        self._error: BaseException | None = None

    # --- the caller's thread --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs all passes. Raises: the first error that one of them met; no thread is left then."""
        threads = []
        try:
            state = _state_of_this_thread(self.generators.device)
            for number, _ in enumerate(self.runs):
                threads.append(self._started(number, state))
        except BaseException as error:  # the system has no more threads
            self._error = error
        self._hand_on(-1)
        try:
            self._all_ended.acquire()
        except BaseException as error:  # that of a signal: micro-batches end at their next barriers
            self._error = self._error or error
        for thread in threads:
            thread.join()
        self._raise()

    def _started(self, number: int, state: Callable[[], AbstractContextManager[None]]) -> threading.Thread:
        thread = threading.Thread(
            target=copy_context().run, args=(self._run, number, state), name=f"{NAME} {number}", daemon=True
        )
        thread.start()
        self._alive.append(number)
        return thread

    def _raise(self) -> None:
        """Raises the first error, to which nothing here refers any more: its frames hold activations."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error

    # --- a micro-batch's own thread -------------------------------------------------------------------------------

    def barrier(self, barrier: Barrier) -> None:
        """Makes the micro-batch that computes wait until all others have reached this barrier, too."""
        number = self.current
        self._arrive(barrier)
        self._hand_on(number)
        self._take(number)

    def gradient(self, p: nn.Parameter) -> Tensor | None:
        """Adds a gradient that backward has just made to those of the micro-batches before, in fp32 as the host would
        do it. Returns: the sum, if this was the last; if not, None."""
        gradient, p.grad = p.grad, None
        before = self.sums.pop(p, None)
        if before is not None:
            gradient = before.float().add_(gradient)
        if self.current == len(self.runs) - 1:
            return gradient
        self.sums[p] = gradient
        belongs(gradient, "gradients")
        return None

    def _run(self, number: int, state: Callable[[], AbstractContextManager[None]]) -> None:
        try:
            self._take(number)
            with state():
                self.runs[number]()
            self._arrive(END)
        except BaseException as error:
            self._error = self._error or error
        finally:
            self._alive.remove(number)
            self._hand_on(number)

    def _take(self, number: int) -> None:
        self._may_run[number].acquire()
        if self._error is not None:
            raise Ended
        self.current = number
        self.enter(number, len(self.runs))
        self.generators.resume(number)

    def _arrive(self, barrier: Barrier) -> None:
        if self._error is not None:
            raise Ended
        if self.current == self._alive[0]:
            self._reached = barrier
        elif barrier != self._reached and not (END in (barrier, self._reached) and self._end_alone):
            raise Refused(
                "weights.order=by_layer: two micro-batches of an optimizer step ran different blocks (for example "
                "because of layer dropout), but all must run the same blocks. Type weights.order=by_micro_batch."
            )
        self.generators.pause(self.current)

    def _hand_on(self, number: int) -> None:
        """Lets the next micro-batch run, or the first one again."""
        following = [other for other in self._alive if other > number] or self._alive
        (self._may_run[following[0]] if following else self._all_ended).release()


def _state_of_this_thread(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Returns a function that makes a context for another thread: torch keeps modes, gradients' being wanted or not and
    the stream by thread. Autocast is kept by thread, too, but no precision that streams weights has it. There backward
    runs in the thread that calls it on a card, too, so that its hooks may wait."""
    assert not any(map(torch.is_autocast_enabled, ("cpu", *CARDS))), (
        "weights.order=by_layer does not carry autocast into its threads"
    )
    modes, wanted, inference = modes_of_this_thread(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    stream = torch.accelerator.current_stream(device) if device.type in CARDS else None

    @contextmanager
    def applied() -> Iterator[None]:
        if stream is not None:  # not as a context: a stream remembers one thread that has entered it
            torch.accelerator.set_stream(stream)
        in_this_thread = torch.autograd.set_multithreading_enabled  # last: entering inference mode sets it, too
        with modes(), torch.inference_mode(inference), torch.set_grad_enabled(wanted), in_this_thread(False):
            yield

    return applied
