"""Swaps the loops over blocks and micro-batches: all micro-batches of a window pass through a block before any enters
the next block.

Streamed weights are copied to the device twice per *window* instead of twice per micro-batch, and each block's gradient
is sent to the host once, already summed. So with clip=null the host steps the masters immediately, and needs no buffer
for sums of gradients.

Each micro-batch runs the model's unchanged forward pass and its own `backward()` in its own thread. Only one thread
runs at a time. A thread waits at a barrier before each block: in the block's forward pre-hook, and in backward in the
hook on the gradient of the block's output. With 2 micro-batches and 2 blocks, time goes from left to right:

    thread 0 | embedding |           | block 0 |         | block 1, head, loss |                     | block 1 backward
    thread 1 |           | embedding |         | block 0 |                     | block 1, head, loss |
                         ^ barrier: the thread stops, saves its random state, and wakes the next thread

In other words the threads are coroutines that run round robin, each from one barrier to the next. The model is neither
traced nor split, so any code between its blocks runs as it is. The part from the last block to backward is computed by
one micro-batch after the other, so the logits of only one micro-batch exist at a time. All threads share the caller's
stream, and `current`, `sums` and `_alive` need no lock, since the semaphores let only one thread run.

The price: the block inputs of all micro-batches are stored (`gradient_checkpointing=offload` moves them to host
memory), plus the fp32 sum of one block's gradients on the device (4 bytes per parameter of that block), and for a head
that is tied to the embedding one gradient per micro-batch. A switch between threads takes about 20 microseconds.
Source: RoundPipe, arXiv 2604.27085; GreedySnake, arXiv 2512.17570.
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

NAME = "micro-batch"  # prefix of the threads' names
Barrier = tuple[str, int]  # ("forward" or "backward", index of the block)
END: Barrier = ("end", 0)


class MicroBatchCancelled(Exception):
    """Raised in a micro-batch's thread to end it after another micro-batch has failed. Must derive from `Exception`:
    torch runs always_call hooks for no other class."""


class ByLayer:
    """Runs the micro-batches of one window through the blocks together.

    Args:
        runs: functions that each compute one micro-batch.
        generators: random number generator states, one per micro-batch.
        enter: called with (index of the micro-batch, number of micro-batches) whenever a micro-batch starts or
            continues.
    """

    def __init__(
        self, runs: Sequence[Callable[[], None]], generators: Generators, enter: Callable[[int, int], None]
    ) -> None:
        self.runs, self.generators, self.enter = runs, generators, enter
        self.current = 0  # index of the micro-batch whose thread runs
        # gradients of the window, until the last micro-batch has added its gradient
        self.sums: dict[nn.Parameter, Tensor] = {}
        self._alive: list[int] = []  # micro-batches whose threads have not ended
        self._may_run = [threading.Semaphore(0) for _ in runs]
        self._all_ended = threading.Semaphore(0)
        self._reached: Barrier = END  # the barrier that the first unfinished micro-batch has reached in this round
        # Without gradients (when generating), one micro-batch may end before other micro-batches, because texts differ
        # in length.
        self._end_alone = not torch.is_grad_enabled()
        self._error: BaseException | None = None

    # --- the caller's thread --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs all micro-batches. Raises the first error of any micro-batch, after all threads have ended."""
        threads = []
        try:
            state = _state_of_this_thread(self.generators.device)
            for number, _ in enumerate(self.runs):
                threads.append(self._started(number, state))
        except BaseException as error:  # no more threads can be started
            self._error = error
        self._hand_on(-1)
        try:
            self._all_ended.acquire()
        except BaseException as error:  # raised by a signal handler: micro-batches end at their next barriers
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
        """Raises the first error and drops all references to it, since its traceback keeps activations alive."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error

    # --- a micro-batch's own thread -------------------------------------------------------------------------------

    def barrier(self, barrier: Barrier) -> None:
        """Blocks the current micro-batch's thread until all other micro-batches have reached this barrier too."""
        number = self.current
        self._arrive(barrier)
        self._hand_on(number)
        self._take(number)

    def gradient(self, p: nn.Parameter) -> Tensor | None:
        """Adds `p.grad` to the sum over earlier micro-batches, in fp32 as the host would. Returns: the sum after the
        last micro-batch, otherwise None."""
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
            raise MicroBatchCancelled
        self.current = number
        self.enter(number, len(self.runs))
        self.generators.resume(number)

    def _arrive(self, barrier: Barrier) -> None:
        if self._error is not None:
            raise MicroBatchCancelled
        if self.current == self._alive[0]:
            self._reached = barrier
        elif barrier != self._reached and not (END in (barrier, self._reached) and self._end_alone):
            raise Refused(
                "weights.order=by_layer: two micro-batches of an optimizer step ran different blocks (for example "
                "because of layer dropout), but all must run the same blocks. Type weights.order=by_micro_batch."
            )
        self.generators.pause(self.current)

    def _hand_on(self, number: int) -> None:
        """Wakes the next micro-batch after `number`, or the first unfinished micro-batch; the caller after the last."""
        following = [other for other in self._alive if other > number] or self._alive
        (self._may_run[following[0]] if following else self._all_ended).release()


def _state_of_this_thread(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Returns a context manager that applies this thread's torch state in another thread: dispatch modes, grad mode,
    inference mode and the current stream, all of which torch keeps per thread. Autocast is per thread too, but no
    precision that streams weights uses autocast. Within the context, backward runs in the calling thread on a card too,
    so that its hooks may wait at barriers."""
    assert not any(map(torch.is_autocast_enabled, ("cpu", *CARDS))), (
        "weights.order=by_layer does not carry autocast into its threads"
    )
    modes, wanted, inference = modes_of_this_thread(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    stream = torch.accelerator.current_stream(device) if device.type in CARDS else None

    @contextmanager
    def applied() -> Iterator[None]:
        if stream is not None:  # `with stream:` is not thread-safe
            torch.accelerator.set_stream(stream)
        in_this_thread = torch.autograd.set_multithreading_enabled  # last: inference mode changes this flag
        with modes(), torch.inference_mode(inference), torch.set_grad_enabled(wanted), in_this_thread(False):
            yield

    return applied
