"""One assembler as a process of its own, which may come to harm at a named point of its loop:

python -m tests.assembler_process CONFIG.json INSTANCE [stop|kill|block] [POINT] [N]

The N-th time it reaches POINT (see tests/flush_points.py; the first time unless N is given) it
stops itself (SIGSTOP), kills itself (SIGKILL), or blocks its loop until SIGUSR2 while its clients'
threads go on. SIGUSR1: every thread's stack on stderr.
"""

import argparse
import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from consumers import worker
from schemas.config import Config
from tests.flush_points import POINTS, act_at

LONGEST_BLOCK_S = 120.0

log = logging.getLogger("tests.assembler_process")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    faulthandler.register(signal.SIGUSR1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})  # it is waited for instead
    arguments = parsed()
    if arguments.action:
        act_at(arguments.point, arguments.number, act_of(arguments))
    changes: dict[str, Any] = {}
    if arguments.read_uncommitted:
        changes["isolation.level"] = "read_uncommitted"
    if arguments.max_poll_ms:
        changes["max.poll.interval.ms"] = arguments.max_poll_ms
    usual = worker.consumer_config
    worker.consumer_config = lambda *rest: usual(*rest) | changes  # of the main consumer alone
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    config = Config.model_validate_json(Path(arguments.config).read_text())
    worker.run(config, instance=arguments.instance, stop=stop)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.assembler_process")
    parser.add_argument("config")
    parser.add_argument("instance")
    parser.add_argument("action", nargs="?", choices=("stop", "kill", "block"))
    parser.add_argument("point", nargs="?", choices=POINTS, default=POINTS[0])
    parser.add_argument("number", nargs="?", type=int, default=1)
    parser.add_argument("--victim", type=int, help="pid to stop or kill in its own place")
    parser.add_argument("--max-poll-ms", type=int, help="max.poll.interval.ms of its consumer")
    parser.add_argument("--read-uncommitted", action="store_true")
    return parser.parse_args()


def act_of(arguments: argparse.Namespace) -> Callable[[], None]:
    what, victim = arguments.action, arguments.victim or os.getpid()

    def act() -> None:
        log.info("reached %s for the %dth time: %s", arguments.point, arguments.number, what)
        if what == "block":
            signal.sigtimedwait({signal.SIGUSR2}, LONGEST_BLOCK_S)
        else:
            os.kill(victim, signal.SIGSTOP if what == "stop" else signal.SIGKILL)

    return act


if __name__ == "__main__":
    main()
