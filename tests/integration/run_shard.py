"""One gym shard as a process of its own: `python -m tests.integration.run_shard CONFIG SHARD N`."""

import signal
import sys
import threading
from pathlib import Path

from producers.gym_shard import run
from schemas.config import Config

if __name__ == "__main__":
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    config = Config.model_validate_json(Path(sys.argv[1]).read_bytes())
    run(config, shard=sys.argv[2], replica=int(sys.argv[3]), stop=stop)
