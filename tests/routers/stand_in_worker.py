"""What a router needs of an engine: a model, health, and an answer to each completion."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class StandInWorker:
    """Listens at a port of loopback, and keeps the prompts that it was sent."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        prompts = self.prompts

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer({"object": "list", "data": [{"id": "m", "object": "model"}]})

            def do_POST(self) -> None:
                prompts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"])
                choice = {"index": 0, "text": "x", "finish_reason": "length"}
                self._answer({"id": "1", "object": "text_completion", "choices": [choice], "usage": {}})

            def _answer(self, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
