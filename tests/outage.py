"""Rows that keep coming and an assembler that is started again, whatever is away."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from confluent_kafka import Producer

from schemas.identity import key_of, partition_of
from tests.assembling import Run, log_of, process, shuffled_rows

BLOCK = 5  # tasks whose rows are mixed
PAUSE_S = 0.8
AGAIN_S = 0.5
END_S = 60.0
TRACEBACK = r"Traceback (most recent call last):"
CHAINED = re.compile(
    r"(The above exception was the direct cause of the following exception:|"
    r"During handling of the above exception, another exception occurred:)\s+"
    + re.escape(TRACEBACK)
)
# A supervisor starts it again after these. An old transaction reads as fenced too.
ENDS_TO_START_AGAIN = ("schemas.errors.Fenced:", "schemas.errors.DeadlineExceeded:")
ERROR = re.compile(r"^(?:schemas|cimpl|[A-Z])[A-Za-z_.]+: .*$", re.M)  # not indented


class Load:
    """Sends whole tasks, block by block, through every outage, until stop().

    `sent`: (task_index, payload) of each row; `tasks`: how many, dense from 0.
    """

    def __init__(self, run: Run) -> None:
        self.sent: list[tuple[int, bytes]] = []
        self.tasks = 0
        self._run = run
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send, name="load", daemon=True)
        self._producer = Producer(
            {
                "bootstrap.servers": run.config.kafka.bootstrap_servers,
                "enable.idempotence": True,
                "message.timeout.ms": 300_000,
                "metadata.recovery.strategy": "none",
            }
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(END_S)

    def stop(self) -> None:
        """All rows are acknowledged when this returns."""
        self.__exit__()
        assert self._producer.flush(END_S) == 0

    def _send(self) -> None:
        manifest, topic = self._run.manifest, self._run.topics.rows
        while not self._stop.wait(PAUSE_S):
            rows = shuffled_rows(manifest, range(self.tasks, self.tasks + BLOCK))
            for task, payload in rows:
                place = partition_of(task, manifest.num_partitions)
                self._producer.produce(topic, payload, key_of(task), place)
            self._producer.poll(0)
            self.sent += rows
            self.tasks += BLOCK


@contextmanager
def kept_alive(run: Run, directory: Path, instance: str) -> Iterator[None]:
    """An assembler that is started again when it ends, as its supervisor would."""
    stop = threading.Event()

    def keep() -> None:
        while not stop.is_set():
            with process(run, directory, instance) as running:
                while running.poll() is None and not stop.is_set():
                    time.sleep(0.05)
            stop.wait(AGAIN_S)

    thread = threading.Thread(target=keep, name=f"keeps {instance}", daemon=True)
    with ExitStack() as cleanup:
        cleanup.callback(thread.join, END_S)
        cleanup.callback(stop.set)
        thread.start()
        yield


def ends_of(run: Run, directory: Path, *instances: str) -> list[str]:
    """The error that each process ended with, as the last line of its traceback."""
    found = []
    for instance in instances:
        text = log_of(run, directory, instance).read_text(errors="replace")
        for chain in CHAINED.sub("", text).split(TRACEBACK)[1:]:
            found.append(ERROR.findall(chain)[-1])
    return found
