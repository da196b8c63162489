"""An OpenAI-compatible completions server with made-up logprobs, whose faults a test chooses."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson

Reply = tuple[int, dict[str, Any]]
Answering = Callable[[dict[str, Any]], Reply]


def logprob_of(token: int) -> float:
    """What the server says of a token that is not the first."""
    return -(token % 97) / 8


def echoed(request: dict[str, Any]) -> Reply:
    choices = [
        {
            "index": index,
            "logprobs": {"token_logprobs": [None, *(logprob_of(token) for token in prompt[1:])]},
        }
        for index, prompt in enumerate(request["prompt"])
    ]
    return 200, {"choices": choices[::-1]}  # any order is allowed


@contextmanager
def teacher_server(answering: Answering = echoed, trickles_s: float = 0.0) -> Iterator[str]:
    """Its base_url. `answering` is called in a thread of its own for each request, and may wait.

    With `trickles_s` it rests so long after each 100 bytes.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            request = orjson.loads(self.rfile.read(length)) | {
                "path": self.path,
                "authorization": self.headers["Authorization"],
            }
            status, body = answering(request)
            payload = orjson.dumps(body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            for at in range(0, len(payload), 100 if trickles_s else len(payload)):
                self.wfile.write(payload[at : at + (100 if trickles_s else len(payload))])
                time.sleep(trickles_s)

        def log_message(self, *_: Any) -> None:
            """Tests read their own output."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None:
            """A client that did not wait is what some tests are about."""

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
