"""Which broker a run gets: the order of attempts, and one error when none serves.

given bootstrap servers ─ set? ─▶ they, or an error: never another cluster in their place
this directory's broker ─ runs? ─▶ it, restarted if its settings differ
Docker engine ─ works? ─▶ a container          Java ─ works? ─▶ a process
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from infra.broker.answering import Questioner
from infra.broker.broker import (
    Broker,
    GivenBroker,
    How,
    LocalBroker,
    Server,
    Starter,
    end,
)
from infra.broker.directory import BrokerDirectory, Running, locked
from infra.broker.docker_engine import ContainerStarter, find_container, find_engine, find_image
from infra.broker.errors import AttemptFailed, BrokerUnavailable, Failure, WaitTimedOut
from infra.broker.jars import KAFKA_VERSION, jars
from infra.broker.jvm import DEFAULT_HEAP
from infra.broker.local_java import JavaStarter, find_java
from infra.broker.ports import free_port, is_free
from infra.broker.process import find_process
from infra.broker.settings import DEFAULT_RECORD_BYTES, server_properties
from infra.broker.waiting import Progress, wait_until

GIVEN_ANSWER_S = 20.0
PORT_TRIES = 3


class Wanted(NamedTuple):
    """What is asked of a broker of ours; `port` None: any."""

    record_bytes: int
    port: int | None
    heap: tuple[str, str]
    proxied: Mapping[int, int]

    def properties(self, place: BrokerDirectory, ports: tuple[int, int]) -> str:
        """`ports`: the broker's and the controller's."""
        return server_properties(place.data, *ports, self.record_bytes, self.proxied)


class Way(NamedTuple):
    """A way to run a broker here; `find` raises AttemptFailed when it cannot work."""

    name: str
    how: How
    find: Callable[[BrokerDirectory, tuple[str, str], Progress], Starter]


def with_docker(
    directory: BrokerDirectory, heap: tuple[str, str], progress: Progress
) -> ContainerStarter:
    """Raises AttemptFailed without an engine that answers or without an image."""
    docker = find_engine()
    return ContainerStarter(directory, docker, find_image(docker, progress), heap)


def with_java(directory: BrokerDirectory, heap: tuple[str, str], progress: Progress) -> JavaStarter:
    """Raises AttemptFailed without a Java that is new enough or without the jars."""
    java = find_java()
    return JavaStarter(directory, java, jars(progress), heap)


WAYS = (Way("Docker", "docker", with_docker), Way("Java", "java", with_java))


def start_broker(
    directory: Path,
    *,
    bootstrap_servers: str | None = None,
    record_bytes: int = DEFAULT_RECORD_BYTES,
    port: int | None = None,
    heap: tuple[str, str] = DEFAULT_HEAP,
    proxied: Mapping[int, int] = MappingProxyType({}),
    progress: Progress,
    ways: Sequence[Way] = WAYS,
) -> Broker:
    """A broker that answers. `directory` is for one broker of ours: its data outlives it.

    `record_bytes` is the largest record value it must take; `port` one on 127.0.0.1, chosen by us
    when None; `heap` Java's -Xms and -Xmx; `proxied` as in server_properties(). `progress` gets a
    line for each wait over two seconds.

    Raises BrokerUnavailable when no way works, ValueError for a size outside Kafka's range,
    WaitTimedOut when another process keeps the directory locked.
    """
    if bootstrap_servers:
        return _given(bootstrap_servers, progress)
    place = BrokerDirectory.at(directory)
    wanted = Wanted(record_bytes, port, heap, proxied)
    with locked(place.path / "lock", f"it starts the broker of {place.path}", progress):
        broker = _reused(ways, place, wanted, progress)
        return broker or _first_that_serves(ways, place, wanted, progress)


def stop_leftover(directory: Path, progress: Progress) -> bool:
    """Stops the broker that an earlier run left in `directory`; whether there was one."""
    if not directory.exists():
        return False
    place = BrokerDirectory.at(directory)
    with locked(place.path / "lock", f"it starts the broker of {place.path}", progress):
        running = place.read_running()
        server = running and find_server(running)
        if not running or not server:
            return False
        _end_leftover(place, running, server, progress)
        return True


def find_server(running: Running) -> Server | None:
    """The broker of a directory's record, if it still runs."""
    return find_container(running) if running.container else find_process(running)


def _given(bootstrap_servers: str, progress: Progress) -> GivenBroker:
    questioner = Questioner(bootstrap_servers)
    what = f"waiting for the given broker {bootstrap_servers} to answer"
    try:
        wait_until(questioner.answers, what, GIVEN_ANSWER_S, progress)
    except WaitTimedOut as error:
        failure = Failure(
            f"the given bootstrap servers {bootstrap_servers}",
            f"no answer within {GIVEN_ANSWER_S:g} s ({questioner.last_answer})",
            "start that cluster, or correct kafka.bootstrap_servers, or leave it out: then a "
            "broker is started on this machine",
        )
        raise BrokerUnavailable([failure]) from error
    return GivenBroker(bootstrap_servers)


def _reused(
    ways: Sequence[Way], place: BrokerDirectory, wanted: Wanted, progress: Progress
) -> LocalBroker | None:
    """The broker that runs here already; ended, and None, when it cannot be used as it is."""
    running = place.read_running()
    server = running and find_server(running)
    if not running or not server:
        return None
    if not _suits(running, place, wanted):
        progress(f"stopping the broker of {place.path}: its settings differ")
    else:
        try:
            way = next(way for way in ways if way.how == running.how)
            starter = way.find(place, wanted.heap, progress)
            broker = LocalBroker(place, starter, running, server, progress)
            broker.wait_until_it_answers()
            progress(f"using the broker that runs in {place.path} already")
            return broker
        except (StopIteration, AttemptFailed) as error:
            progress(f"stopping the broker of {place.path}, which cannot be used: {error}")
    _end_leftover(place, running, server, progress)
    return None


def _suits(running: Running, place: BrokerDirectory, wanted: Wanted) -> bool:
    if wanted.port not in (None, running.port) or not place.properties.exists():
        return False
    ports = running.port, running.controller_port
    return place.properties.read_text() == wanted.properties(place, ports)


def _end_leftover(
    place: BrokerDirectory, running: Running, server: Server, progress: Progress
) -> None:
    end(server, progress)
    place.write_running(running.ended())


def _first_that_serves(
    ways: Sequence[Way], place: BrokerDirectory, wanted: Wanted, progress: Progress
) -> LocalBroker:
    failures = []
    for way in ways:
        try:
            starter = way.find(place, wanted.heap, progress)
            progress(f"starting Kafka {KAFKA_VERSION} with {way.name} in {place.path}")
            return _start(starter, place, wanted, progress)
        except AttemptFailed as error:
            failures.append(Failure(way.name, error.reason, error.fix))
        except WaitTimedOut as error:
            failures.append(Failure(way.name, str(error), "try again on a less busy machine"))
    given = Failure(
        "given bootstrap servers",
        "none are set",
        "set kafka.bootstrap_servers to a running Kafka's host:port",
    )
    raise BrokerUnavailable([given, *failures])


def _start(
    starter: Starter, place: BrokerDirectory, wanted: Wanted, progress: Progress
) -> LocalBroker:
    for tries_left in reversed(range(PORT_TRIES)):
        running = _with_ports(starter.how, place.read_running(), wanted.port)
        ports = running.port, running.controller_port
        place.properties.write_text(wanted.properties(place, ports))
        broker = LocalBroker(place, starter, running, None, progress)
        try:
            broker.start()
            return broker
        except AttemptFailed:
            # the broker has ended: who listens on its port is another program that was faster
            if not tries_left or all(is_free(port) for port in ports):
                raise
    raise AssertionError("the last try returns or raises")


def _with_ports(how: str, before: Running | None, port: int | None) -> Running:
    """The asked port, else the last ones if they are free, else new ones. Raises AttemptFailed."""
    if port is not None and not is_free(port):
        raise AttemptFailed(
            f"port {port} on 127.0.0.1 is taken by another program",
            f"stop the program that listens on port {port}, or choose another port, or none",
        )
    last = (before.port, before.controller_port) if before else (0, 0)
    usual, controller = (one if one and is_free(one) else free_port() for one in last)
    return Running(how, port or usual, controller)
