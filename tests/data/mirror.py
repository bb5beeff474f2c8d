"""An HTTP server for the tests of downloads."""

from __future__ import annotations

import http.server
import threading
from typing import Any

from conftest import TIMEOUT


class Mirror(http.server.HTTPServer):
    """Serves files on this machine. It sends half of the first file and waits for a signal before the rest."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), MirrorHandler)
        self.files = files
        self.requested: list[str] = []
        self.started, self.resume = threading.Event(), threading.Event()
        self.address = f"http://127.0.0.1:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores a killed client."""


class MirrorHandler(http.server.BaseHTTPRequestHandler):
    server: Mirror
    timeout = TIMEOUT

    def do_GET(self) -> None:
        content = self.server.files[self.path[1:]]
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.server.requested.append(self.path[1:])
        self.wfile.write(content[: len(content) // 2])
        self.server.started.set()
        self.server.resume.wait(TIMEOUT)
        self.wfile.write(content[len(content) // 2 :])

    def log_message(self, *args: Any) -> None:
        pass
