"""One assembler as a process of its own: python -m tests.assembler_process CONFIG.json INSTANCE"""

import logging
import signal
import sys
import threading
from pathlib import Path

from consumers import worker
from schemas.config import Config


def main(config_path: str, instance: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    config = Config.model_validate_json(Path(config_path).read_text())
    worker.run(config, instance=instance, stop=stop)


if __name__ == "__main__":
    main(*sys.argv[1:])
