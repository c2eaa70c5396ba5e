"""Implements weights.order=by_layer: all micro-batches of a window compute a block before any of them computes the next
block. `StreamedWeights` (`streamed.py`) uses this module.

A streamed block is then copied to the device at most twice per *window*, instead of twice per micro-batch. The
gradients of each block's weights are summed on the device, and the sums are sent to the host once per window. So with
early updates the host updates the master of a block's weight as soon as the weight's sum has arrived, and needs no
buffer for the gradients of earlier micro-batches.

Each micro-batch has its own thread, which runs the model's unchanged forward pass and `backward()`. Only one of these
threads runs at a time. A thread waits at a barrier before each streamed block: in forward in the block's pre-hook, and
in backward in the hook on the gradient of the block's output. With 2 micro-batches and 2 blocks, time goes from left to
right:

    thread 0 | embedding |           | block 0 |         | block 1, head, loss |                     | block 1 backward
    thread 1 |           | embedding |         | block 0 |                     | block 1, head, loss |
                         ^ barrier: the thread stops, saves its random state, and wakes the next thread

In other words, the threads are coroutines that take turns, each from one barrier to the next. The model is neither
traced nor split, so any code between its blocks runs unchanged. The next barrier after the forward pass of the last
streamed block is in backward, when the gradient of this block's output has been computed. So a thread runs the head and
the loss, forward and backward, without interruption, and the logits of only one micro-batch exist at a time. All
threads launch kernels on the caller's stream. `current`, `sums` and `_alive` need no lock, since semaphores let only
one of the threads run.

The price is memory. The block inputs of all micro-batches exist at the same time (`gradient_checkpointing=offload`
moves them to the host). The device also stores the fp32 sums of one block's gradients (4 bytes per trained parameter of
the block), and sums that are waiting to be copied to the host (`Link.ahead`). If the head is streamed and tied to the
embedding, host memory stores one gradient (V, H) of the head per micro-batch. A switch between threads takes about 20
microseconds. Sources: RoundPipe, arXiv 2604.27085; GreedySnake, arXiv 2512.17570.
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
    """Raised in the thread of a micro-batch to end this thread, because another micro-batch, or the thread that called
    `ByLayer.run`, has failed. Must derive from `Exception`, because torch runs always_call hooks only after an
    `Exception`."""


class ByLayer:
    """Runs the micro-batches of one window, each in its own thread. All micro-batches compute a block before any of
    them computes the next block.

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
        # weight -> sum of the gradients of earlier micro-batches, on the device; the last micro-batch removes the sum
        self.sums: dict[nn.Parameter, Tensor] = {}
        self._alive: list[int] = []  # micro-batches whose threads have not ended
        self._may_run = [threading.Semaphore(0) for _ in runs]
        self._all_ended = threading.Semaphore(0)
        # the barrier that the first unfinished micro-batch has reached; the other unfinished micro-batches must reach
        # it next
        self._reached: Barrier = END
        # True: a micro-batch may end before the others. Allowed without gradients, because generated texts differ in
        # length.
        self._end_alone = not torch.is_grad_enabled()
        self._error: BaseException | None = None

    # --- the caller's thread --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs all micro-batches, and returns after all threads have ended. Raises the first error, which comes from a
        micro-batch, from the start of a thread, or from a signal handler while this method waits."""
        threads = []
        try:
            state = _state_of_this_thread(self.generators.device)
            for number, _ in enumerate(self.runs):
                threads.append(self._started(number, state))
        except BaseException as error:  # a thread could not be started: the started threads end immediately
            self._error = error
        self._hand_on(-1)
        try:
            self._all_ended.acquire()
        except BaseException as error:  # raised by a signal handler: each micro-batch ends at its next barrier
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
        """Raises the first error, if any, and drops this object's references to the error, since its traceback keeps
        activations alive."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error

    # --- a micro-batch's own thread -------------------------------------------------------------------------------

    def barrier(self, barrier: Barrier) -> None:
        """Blocks the thread of the current micro-batch until its next turn. By then, all other unfinished micro-batches
        have reached the same barrier, and earlier micro-batches have gone on to the next barrier or have ended. Saves
        the states of the random number generators before the wait, and restores them after it.

        Raises:
            Refused: the first unfinished micro-batch is at a different barrier.
            MicroBatchCancelled: another micro-batch or the caller's thread has failed.
        """
        number = self.current
        self._arrive(barrier)
        self._hand_on(number)
        self._take(number)

    def gradient(self, p: nn.Parameter) -> Tensor | None:
        """Removes `p.grad`, and adds it to the sum of the gradients of earlier micro-batches on the device. A sum of
        several gradients is in fp32, like the sums that the host computes with weights.order=by_micro_batch; a single
        gradient keeps its dtype. Returns: the sum if this is the last micro-batch, otherwise None."""
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
        """Wakes the thread of the next unfinished micro-batch after `number`; after the last, the first unfinished one.
        If all micro-batches have ended, wakes the caller of `run`."""
        following = [other for other in self._alive if other > number] or self._alive
        (self._may_run[following[0]] if following else self._all_ended).release()


def _state_of_this_thread(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Returns a function that another thread calls to get a context manager in which this thread's torch state is
    active: torch modes, grad mode, inference mode and the current stream. Torch keeps this state per thread. Autocast
    is per thread, too, but no precision that streams weights uses autocast.

    Within the context, backward runs in the thread that calls it, even on a card, where backward would otherwise run in
    autograd's own thread. So hooks can stop at barriers in backward, too.
    """
    assert not any(map(torch.is_autocast_enabled, ("cpu", *CARDS))), (
        "weights.order=by_layer does not carry autocast into its threads"
    )
    modes, wanted, inference = modes_of_this_thread(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    stream = torch.accelerator.current_stream(device) if device.type in CARDS else None

    @contextmanager
    def applied() -> Iterator[None]:
        if stream is not None:  # `with stream:` is not thread-safe
            torch.accelerator.set_stream(stream)
        # entered last, because inference mode also changes this setting
        in_this_thread = torch.autograd.set_multithreading_enabled
        with modes(), torch.inference_mode(inference), torch.set_grad_enabled(wanted), in_this_thread(False):
            yield

    return applied
