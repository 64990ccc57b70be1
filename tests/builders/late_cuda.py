"""A stub of CUDA that computes late."""

import threading
from contextlib import contextmanager


class Cuda:
    """CUDA as far as streams go: what the engine launches is done only when somebody waits for it.

    `log` has every call; the next event that is waited for on the host raises `fails`.
    """

    def __init__(self):
        self.log, self.launched, self.fails = [], [], None
        self.engine = object()
        cuda = self

        class Event:
            def record(self, stream):
                self.after = len(cuda.launched) if stream is cuda.engine else None
                self.place = len(cuda.log)
                cuda.log.append(("record", "engine" if stream is cuda.engine else "side"))

            def synchronize(self):
                cuda.log.append(("synchronize", self.place))
                if cuda.fails:
                    raise cuda.fails

        class Stream:
            def __init__(self, device):
                pass

            def wait_event(self, event):
                cuda.log.append(("wait", "engine" if event.after is not None else "side"))
                for work in cuda.launched[: event.after]:
                    work()
                cuda.launched[: event.after] = []

            def synchronize(self):
                cuda.log.append(("synchronize", "side"))

        self.Event, self.Stream = Event, Stream

    def set_device(self, device):
        self.log.append(("device", threading.current_thread().name))

    def current_stream(self, device):
        return self.engine

    @contextmanager
    def stream(self, side):
        self.log.append(("copies", "side"))
        yield

    def counts_buffers(self, monkeypatch):
        """The size of every host buffer that is made from now on: on a GPU each is pinned."""
        from dataplane.live.kv import memory

        made, make = [], memory.host_buffer
        counted = lambda size, pinned: made.append(size) or make(size, pinned)  # noqa: E731
        monkeypatch.setattr(memory, "host_buffer", counted)
        return made
