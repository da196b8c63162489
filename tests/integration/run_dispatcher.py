"""The dispatcher as a process of its own: `python -m tests.integration.run_dispatcher CONFIG`."""

import signal
import sys
import threading
from pathlib import Path

from producers.dispatcher import run
from schemas.config import Config

if __name__ == "__main__":
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    run(Config.model_validate_json(Path(sys.argv[1]).read_bytes()), stop=stop)
