"""One real Kafka for the session: under testcontainers where a Docker engine runs, else by Java.

What a session starts is named after its process; the next session ends what dead ones left.
"""

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer

from infra.broker import start_broker, stop_leftover
from infra.broker.answering import Questioner
from infra.broker.broker import ANSWER_S, How
from infra.broker.directory import BrokerDirectory
from infra.broker.docker_engine import (
    IMAGE_JARS,
    ContainerStarter,
    ask,
    find_engine,
    find_image,
    follow_log,
    has_image,
)
from infra.broker.errors import AttemptFailed
from infra.broker.jars import KAFKA_VERSION
from infra.broker.jvm import DEFAULT_HEAP, server_arguments
from infra.broker.ports import free_port
from infra.broker.provision import WAYS
from infra.broker.settings import DEFAULT_RECORD_BYTES, server_properties
from infra.broker.waiting import Progress, wait_until

SESSIONS = Path(tempfile.gettempdir()) / f"groupstream-tests-{os.getuid()}"
OWNER_LABEL = "groupstream.test-owner"
JAVA_ALONE = tuple(way for way in WAYS if way.how == "java")


@dataclass(frozen=True)
class TestBroker:
    """The session's broker. `how`: "docker" or "java"."""

    __test__ = False  # its name is no test's

    bootstrap_servers: str
    how: How
    log_path: Path


def owner() -> str:
    """This process, told apart from a later one with its pid."""
    process = psutil.Process()
    return f"{process.pid}-{int(process.create_time())}"


def lives(name: str) -> bool:
    """Whether the process that owner() named so still runs."""
    pid, created_s = (int(part) for part in name.split("-"))
    try:
        return abs(psutil.Process(pid).create_time() - created_s) <= 2
    except psutil.NoSuchProcess:
        return False


def engine() -> tuple[str | None, str]:
    """The docker command if its engine answers, and the words for the header."""
    try:
        return find_engine(), f"Kafka {KAFKA_VERSION} in a container, under testcontainers"
    except AttemptFailed as error:
        return None, f"Kafka {KAFKA_VERSION} as a Java process ({error.reason})"


def pytest_report_collectionfinish(items: list[pytest.Item]) -> list[str]:
    """Says where Kafka runs, if a collected test needs it."""
    needed = any("broker" in getattr(item, "fixturenames", ()) for item in items)
    return [f"broker: {engine()[1]}"] if needed else []


@pytest.fixture(scope="session")
def broker(request: pytest.FixtureRequest) -> Iterator[TestBroker]:
    """A real Kafka 4.4 that answers."""
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")

    def progress(text: str) -> None:
        reporter.write_line(f"broker: {text}")

    docker, _ = engine()
    end_leftovers(docker, progress)
    directory = SESSIONS / owner()
    with started(docker, directory, progress) as running:
        progress(f"{running.how}, {running.bootstrap_servers}, log {running.log_path}")
        yield running
    shutil.rmtree(directory)


@pytest.fixture
def run_id(request: pytest.FixtureRequest) -> str:
    """A run id of this test alone: letters, digits and dashes."""
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name.lower())
    return f"{name[:40].strip('-')}-{uuid.uuid4().hex[:8]}"


def started(
    docker: str | None, directory: Path, progress: Progress
) -> AbstractContextManager[TestBroker]:
    """The broker by the first way that works; says so when it is not the header's."""
    if docker is not None:
        try:
            image = find_image(docker, progress)
        except AttemptFailed as error:
            progress(f"as a Java process after all: {error.reason}")
        else:
            return under_testcontainers(docker, image, directory, progress)
    return by_java(directory, progress)


@contextmanager
def by_java(directory: Path, progress: Progress) -> Iterator[TestBroker]:
    with start_broker(directory, progress=progress, ways=JAVA_ALONE) as local:
        assert local.log_path is not None
        yield TestBroker(local.bootstrap_servers, local.how, local.log_path)


@contextmanager
def under_testcontainers(
    docker: str, image: str, directory: Path, progress: Progress
) -> Iterator[TestBroker]:
    """On the host's network, as the product's own containers; testcontainers runs and ends it."""
    place = BrokerDirectory.at(directory)
    port, controller_port = free_port(), free_port()
    place.properties.write_text(
        server_properties(place.data, port, controller_port, DEFAULT_RECORD_BYTES)
    )
    starter = ContainerStarter(place, docker, image, DEFAULT_HEAP)
    starter.prepare(progress)
    # its reaper's image cannot be pulled everywhere: end_leftovers() does that work
    testcontainers_config.ryuk_disabled = not has_image(docker, testcontainers_config.ryuk_image)
    container = (
        DockerContainer(image)
        .with_name(f"groupstream-test-{directory.name}")
        .with_command(server_arguments(IMAGE_JARS, place.properties, DEFAULT_HEAP))
        .with_volume_mapping(str(place.path), str(place.path), "rw")
        .with_kwargs(
            network_mode="host",
            entrypoint="java",
            user=f"{os.getuid()}:{os.getgid()}",
            labels={OWNER_LABEL: directory.name},
        )
    )
    servers = f"127.0.0.1:{port}"
    with container as started_container:
        follow_log(docker, started_container.get_wrapped_container().id, place.log)
        questioner = Questioner(servers)
        wait_until(questioner.answers, f"waiting for {servers}", ANSWER_S, progress)
        yield TestBroker(servers, "docker", place.log)


def end_leftovers(docker: str | None, progress: Progress) -> None:
    """Ends the brokers of sessions that died, and removes their directories."""
    for container in containers_of_sessions(docker):
        name, _, session = container.partition(" ")
        if not lives(session):
            progress(f"removing the container of a dead session, {name}")
            ask(str(docker), "rm", "--force", "--volumes", name)
    SESSIONS.mkdir(exist_ok=True)
    for directory in SESSIONS.iterdir():
        if not lives(directory.name):
            if stop_leftover(directory, progress):
                progress(f"stopped the broker of a dead session in {directory}")
            shutil.rmtree(directory, ignore_errors=True)  # another session may do the same


def containers_of_sessions(docker: str | None) -> list[str]:
    """Of every session: "id owner"."""
    if docker is None:
        return []
    form = '{{.ID}} {{.Label "' + OWNER_LABEL + '"}}'
    return ask(
        docker, "ps", "--all", "--filter", f"label={OWNER_LABEL}", "--format", form
    ).splitlines()
