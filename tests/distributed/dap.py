"""A small client of the Debug Adapter Protocol, as an editor has one."""

from __future__ import annotations

import json
import socket
import time
from types import TracebackType
from typing import Any


class DebugClient:
    """Attaches to a process that listens for a debugger.

    Args:
        port: Port on the loopback address.
        timeout: Seconds that each answer may take.
    """

    def __init__(self, port: int, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._socket = socket.create_connection(("127.0.0.1", port), timeout)
                break
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        self._file = self._socket.makefile("rwb")
        self._sent = 0
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> DebugClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def send(self, command: str, **arguments: Any) -> int:
        """Sends a request, and returns its number."""
        self._sent += 1
        request = {"seq": self._sent, "type": "request", "command": command, "arguments": arguments}
        body = json.dumps(request).encode()
        self._file.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self._file.flush()
        return self._sent

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Sends a request, and returns the body of its answer."""
        number = self.send(command, **arguments)
        while True:
            message = self._read()
            if message["type"] == "response" and message["request_seq"] == number:
                assert message["success"], message
                return dict(message.get("body") or {})
            self._events.append(message)

    def wait_for(self, event: str) -> dict[str, Any]:
        """Returns the body of the next event of a kind."""
        while True:
            message = self._events.pop(0) if self._events else self._read()
            if message["type"] == "event" and message["event"] == event:
                return dict(message.get("body") or {})

    def _read(self) -> dict[str, Any]:
        size = 0
        while line := self._file.readline().strip():
            if line.startswith(b"Content-Length:"):
                size = int(line.split(b":")[1])
        return dict(json.loads(self._file.read(size)))
