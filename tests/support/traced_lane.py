"""Finds races between threads and copies, regardless of timing, with torch's happens-before checker. This module
reports to the checker how threads and copies access the memory that they share.

`torch.cuda._sanitizer.EventHandler` has a vector clock for each stream. Here the streams are the device's computation,
each direction of copies, and each host thread. Work that a thread launches on a stream is ordered after the previous
work of the thread. A thread is ordered after a stream only if it waits for an event, and after another thread only
through a queue, a future, a flag or a semaphore. Copies run synchronously. The checker compares clocks instead of
times: it reports an error for a write and another access to the same memory unless one of the two is ordered after the
other.

The checker watches the memory that a lane allocates, registers or copies (staging slots, slots of weights, host blocks,
gradients, weights and offloaded activations). An operator belongs to the device's stream if the training thread or a
micro-batch thread of by_layer runs it and it does not access watched host memory. Every other operator belongs to the
stream of its thread.
"""

import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from queue import SimpleQueue
from traceback import StackSummary
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowmem.offload import by_layer, link, registered
from lowmem.offload.copy_lanes import CardLane
from lowmem.offload.link import StagedLink
from lowmem.techniques.optim import adamw8bit, bitsandbytes_cpu, compiled

# Without the patch, importing the sanitizer would activate its hooks for cards, and later tests would record the stack
# of every allocation.
with patch.object(torch._C, "_activate_gpu_trace", lambda: None):
    from torch.cuda._sanitizer import Access, AccessType, EventHandler

DEVICE, DOWN, UP = "device", "copies to the host", "copies to the device"
NO_ACCESS = ("aten.empty", "aten.new_empty", "aten.sym_", "aten.is_", "aten.detach")


class Races:
    """Collects the errors that the checker finds. The checker is not thread-safe, so `lock` protects it."""

    def __init__(self):
        self.handler, self.lock, self.numbers = EventHandler(), threading.RLock(), count(1)
        self.errors, self.checked, self.events = [], 0, count(1)
        self.watched, self.on_host, self.kept = {}, set(), set()
        self.written = {}  # address of a storage -> sequence number of the last write by the device

    # --- order ----------------------------------------------------------------------------------------------------

    def host(self):
        """Returns the name of the current thread's stream."""
        return f"host thread {threading.current_thread().name}"

    def record(self, stream):
        """Returns the number of an event that is complete when all previous work of the stream is complete."""
        with self.lock:
            event = next(self.events)
            self.handler._handle_event_record(event, stream)
            return event

    def wait(self, stream, event):
        with self.lock:
            self.handler._handle_event_wait(event, stream)

    def order(self, stream, after):
        """Orders all later work of a stream after all previous work of another stream."""
        with self.lock:
            states = self.handler.syncs.current_sync_states
            for name in (stream, after):
                self.handler.syncs._ensure_stream_exists(name)
            self.handler.syncs._state_wait_for_other(states[stream], states[after])

    # --- accesses -------------------------------------------------------------------------------------------------

    def key(self, tensor, watch=False, on_host=False):
        """Returns the number of a tensor's storage, or None if the storage is not watched.

        Args:
            watch: True watches the storage from now on.
            on_host: True marks the storage as host memory, unless the storage is already watched.
        """
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place not in self.watched and watch:
            self.watched[place] = number = next(self.numbers)
            if on_host:
                self.on_host.add(number)
            elif (seq := self.written.get(place)) is not None:
                self.handler.tensors_accessed.ensure_tensor_exists(number)
                wrote = Access(AccessType.WRITE, seq, DEVICE, "computes it", [""], False, StackSummary())
                self.handler.tensors_accessed.set_write(number, wrote)
            weakref.finalize(storage, self.freed, place, number)
        return self.watched.get(place)

    def freed(self, place, number):
        """Reports a write by the device to a watched storage when the storage is freed, because the device's allocator
        may reuse the memory for the next computation. Reports nothing for host memory, or for memory that was passed to
        `TracedLane.keep`."""
        with self.lock:
            self.watched.pop(place, None)
            if number not in self.on_host and number not in self.kept:
                self.order(DEVICE, self.host())
                self.access(DEVICE, (), (number,), "is given other memory's place")

    def access(self, stream, reads, writes, name):
        """Reports that work on a stream reads and writes storages, and collects the errors. Args: reads, writes:
        numbers of storages; name: name of the work for error messages."""
        with self.lock:
            reads, writes = set(reads) - set(writes), set(writes)
            self.checked += len(reads) + len(writes)
            names = {number: [name] for number in reads | writes}
            self.errors += self.handler._handle_kernel_launch(stream, reads, writes, set(), name, names)

    def operator(self, func, args, kwargs, out):
        """Reports the accesses of an operator that the current thread has run."""
        name = str(func)
        if func.is_view or name.startswith(NO_ACCESS):
            return
        reads, writes = [], []
        for number, argument in enumerate(func._schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            changes = argument.alias_info is not None and argument.alias_info.is_write
            (writes if changes else reads).extend(tensors)
        with self.lock:
            numbers = [[n for n in map(self.key, tensors) if n is not None] for tensors in (reads, writes)]
            host = not trains(threading.current_thread()) or not self.on_host.isdisjoint(numbers[0] + numbers[1])
            if not host:
                self.order(DEVICE, self.host())
            if numbers[0] or numbers[1]:
                self.access(self.host() if host else DEVICE, *numbers, name)
            if not host:
                self.handler.seq_num += 1
                self.handler.syncs.update_seq_num(DEVICE, self.handler.seq_num)
                for tensor in (*writes, *(leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))):
                    self.written[tensor.untyped_storage()._cdata] = self.handler.seq_num


def trains(thread):
    return thread is threading.main_thread() or thread.name.startswith(by_layer.NAME)


class Watching(TorchDispatchMode):
    """A dispatch mode that reports the operators of this thread to the checker."""

    def __init__(self, races):
        super().__init__()
        self.races = races

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.races.operator(func, args, kwargs or {}, out)
        return out


class Stream:
    """Stands in for a CUDA stream, but its work runs synchronously."""

    def __init__(self, races, name):
        self.races, self.name = races, name

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def record_event(self):
        self.races.order(self.name, self.races.host())  # the host queues the event after its own previous work
        return Event(self.races, self.races.record(self.name))

    def wait_event(self, event):
        self.races.order(self.name, self.races.host())
        self.races.wait(self.name, event.number)


class Event:
    def __init__(self, races, number):
        self.races, self.number = races, number

    def synchronize(self):
        self.races.wait(self.races.host(), self.number)


class TracedLane(CardLane):
    """A `CardLane` on a CPU that reports its copies and events to the checker.

    Args:
        races: collects the errors.
        registers: False makes `register` return an error message, as if memory could not be pinned.
    """

    def __init__(self, races, registers=True):
        self.races, self.can_register = races, registers
        self._streams = iter((DOWN, UP))
        super().__init__(torch.device("cpu"))

    def new_stream(self):
        return Stream(self.races, next(self._streams))

    def computing(self):
        return Stream(self.races, DEVICE)

    def is_host(self, memory):
        with self.races.lock:
            return self.races.key(memory) in self.races.on_host

    def keep(self, memory, stream):
        with self.races.lock:
            self.races.kept.add(self.races.key(memory))

    def staging(self, size):
        memory = torch.empty(max(size, 1), dtype=torch.uint8)[:size]
        with self.races.lock:
            self.races.key(memory, watch=True, on_host=True)
        return memory

    def copy(self, to, source, after):
        with self.races.lock:
            pair = [self.races.key(tensor, watch=True) for tensor in (to, source)]
            stream = UP if pair[1] in self.races.on_host else DOWN
        with NotWatched():
            reached = super().copy(to, source, after)
        # report the accesses after the waits in super().copy, and before the event that this copy returns
        self.races.access(stream, pair[1:], pair[:1], "copy")
        reached.number = self.races.record(stream)
        return reached

    def register(self, memory):
        with self.races.lock:
            self.races.key(memory, watch=True, on_host=True)
        return None if self.can_register else "this lane registers nothing"

    def unregister(self, memory):
        pass


class NotWatched:
    """Context manager that disables dispatch modes during a copy, because `TracedLane.copy` itself reports the copy."""

    def __enter__(self):
        self._off = torch.utils._python_dispatch._disable_current_modes()
        self._off.__enter__()

    def __exit__(self, *error):
        self._off.__exit__(*error)


# --- order between threads of the host --------------------------------------------------------------------------------


def traced_queue(races):
    class Queue:
        def __init__(self):
            self.items = SimpleQueue()

        def put(self, item):
            self.items.put((races.record(races.host()), item))

        def get(self):
            event, item = self.items.get()
            races.wait(races.host(), event)
            return item

    return Queue


def traced_future(races):
    class TracedFuture(Future):
        event = None

        def set_result(self, result):
            self.event = races.record(races.host())
            super().set_result(result)

        def set_exception(self, error):
            self.event = races.record(races.host())
            super().set_exception(error)

        def result(self, timeout=None):
            try:
                return super().result(timeout)
            finally:
                if self.event is not None:
                    races.wait(races.host(), self.event)

        def exception(self, timeout=None):
            error = super().exception(timeout)
            races.wait(races.host(), self.event)
            return error

    return TracedFuture


def traced_flag(races):
    class Flag(threading.Event):
        event = None

        def set(self):
            self.event = races.record(races.host())
            super().set()

        def wait(self, timeout=None):
            found = super().wait(timeout)
            if self.event is not None:
                races.wait(races.host(), self.event)
            return found

    return Flag


def traced_semaphore(races):
    class Semaphore(threading.Semaphore):
        """A semaphore whose `acquire` orders the thread after all previous work of the thread that released it last."""

        event = None

        def release(self):
            self.event = races.record(races.host())
            super().release()

        def acquire(self):
            super().acquire()
            races.wait(races.host(), self.event)

    return Semaphore


def traced_pool(races):
    future = traced_future(races)

    class Pool:
        def __init__(self, size, name):
            self.pool = ThreadPoolExecutor(size, name)

        def submit(self, call, *args):
            given, answer = races.record(races.host()), future()

            def work():
                races.wait(races.host(), given)
                with Watching(races):
                    try:
                        answer.set_result(call(*args))
                    except BaseException as error:
                        answer.set_exception(error)

            self.pool.submit(work)
            return answer

        def shutdown(self):
            self.pool.shutdown()

    return Pool


@contextmanager
def watched():
    """Yields a `Races` that collects the errors of trainings in this context."""
    races = Races()
    work, address = StagedLink._work, compiled.address

    def working(self):
        with Watching(races):
            work(self)

    def pointer(tensor):  # a C++ function gets the address, and may write to the tensor
        if tensor is not None and (number := races.key(tensor)) is not None:
            races.access(races.host(), (), (number,), "a C++ function")
        return address(tensor)

    with ExitStack() as patches:
        for owner, name, value in (
            (StagedLink, "_work", working),
            (link, "queue", SimpleNamespace(SimpleQueue=traced_queue(races))),
            (link, "Future", traced_future(races)),
            (link, "threading", SimpleNamespace(Event=traced_flag(races), Thread=threading.Thread)),
            (registered, "ThreadPoolExecutor", traced_pool(races)),
            (by_layer, "threading", SimpleNamespace(Semaphore=traced_semaphore(races), Thread=threading.Thread)),
            *((module, "address", pointer) for module in (adamw8bit, bitsandbytes_cpu)),
        ):
            patches.enter_context(patch.object(owner, name, value))
        patches.enter_context(Watching(races))
        yield races
