"""A TCP port that passes everything on to another and keeps it: what a listener between hosts has."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Wiretap:
    """Listens at `port` for connections to `to`; `heard` are the bytes of both directions."""

    def __init__(self, to: int) -> None:
        self._to = to
        self.heard: list[bytes] = []
        self._open = [socket.create_server(("127.0.0.1", 0))]
        self._threads: list[threading.Thread] = []
        self.port: int = self._open[0].getsockname()[1]
        self._spawn(self._accept)

    def close(self) -> None:
        """End all connections."""
        for end in tuple(self._open):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join()
        for end in self._open:
            end.close()

    def _spawn(self, work: object, *given: object) -> None:
        thread = threading.Thread(target=work, args=given)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._open[0].accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                self._open += [near, far]
                self._spawn(self._pass_on, near, far)
                self._spawn(self._pass_on, far, near)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while said := source.recv(1 << 16):
                self.heard.append(said)
                target.sendall(said)
            target.shutdown(socket.SHUT_WR)
