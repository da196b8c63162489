"""A broker in a container, through the `docker` command."""

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from infra.broker.broker import How
from infra.broker.directory import BrokerDirectory, Running, new_cluster_id
from infra.broker.errors import AttemptFailed, CommandFailed, WaitTimedOut
from infra.broker.image import LOCAL_IMAGE, build_image
from infra.broker.jars import KAFKA_VERSION
from infra.broker.jvm import format_arguments, server_arguments
from infra.broker.waiting import Progress, last_lines, run_command, wait_until

PUBLIC_IMAGE = f"apache/kafka:{KAFKA_VERSION}"
ENGINE_S = 10.0  # every short question to the engine
FIRST_WORD_S = 8.0  # a registry that can be reached has answered by then
PULL_S = 600.0
FORMAT_S = 60.0
IMAGE_JARS = "/opt/kafka/libs/*"  # in the public image and in ours
ENGINE_FIX = "start a Docker engine (Linux: systemctl start docker; or Docker Desktop)"


def find_engine() -> str:
    """The path of a `docker` whose engine answers. Raises AttemptFailed."""
    docker = shutil.which("docker")
    if docker is None:
        raise AttemptFailed("docker is not on the PATH", "install Docker (docs.docker.com)")
    try:
        ask(docker, "info", "--format", "{{.ServerVersion}}")
    except CommandFailed as error:
        raise AttemptFailed(f"no Docker engine answers: {error}", ENGINE_FIX) from error
    return docker


def ask(docker: str, *arguments: str) -> str:
    """What a short docker command prints. Raises CommandFailed, with what it complained about."""
    try:
        answer = subprocess.run(
            [docker, *arguments], capture_output=True, text=True, timeout=ENGINE_S, check=True
        )
    except subprocess.CalledProcessError as error:
        raise CommandFailed(error.stderr.strip() or f"docker {arguments[0]}: {error}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandFailed(f"docker {arguments[0]}: {error}") from error
    return answer.stdout.strip()


def has_image(docker: str, image: str) -> bool:
    """Whether the engine has it locally."""
    try:
        ask(docker, "image", "inspect", "--format", "{{.Id}}", image)
    except CommandFailed:
        return False
    return True


def find_image(docker: str, progress: Progress) -> str:
    """An image with Kafka: there already, else pulled, else built from Maven's jars.

    Raises AttemptFailed when it can be neither pulled nor built.
    """
    for image in (PUBLIC_IMAGE, LOCAL_IMAGE):
        if has_image(docker, image):
            return image
    try:
        pull(docker, PUBLIC_IMAGE, progress)
        return PUBLIC_IMAGE
    except (CommandFailed, WaitTimedOut) as error:
        progress(f"{PUBLIC_IMAGE} cannot be pulled: building {LOCAL_IMAGE} from Kafka's jars")
        not_pulled = error
    try:
        build_image(docker, LOCAL_IMAGE, progress)
    except (AttemptFailed, CommandFailed, WaitTimedOut) as error:
        raise AttemptFailed(
            f"{PUBLIC_IMAGE} cannot be pulled ({not_pulled}) and {LOCAL_IMAGE} not built ({error})",
            f"let the engine pull it: docker pull {PUBLIC_IMAGE}",
        ) from error
    return LOCAL_IMAGE


def pull(docker: str, image: str, progress: Progress) -> None:
    """Raises WaitTimedOut when the registry is silent for FIRST_WORD_S, CommandFailed."""
    progress(f"pulling {image}")
    log = Path(tempfile.mkstemp(prefix="groupstream-pull-")[1])
    with log.open("wb") as output:
        process = subprocess.Popen(
            [docker, "pull", image],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(
            lambda: process.poll() is not None or log.stat().st_size > 0,
            f"asking the registry for {image}",
            FIRST_WORD_S,
            progress,
        )
        what = f"pulling {image}"
        wait_until(lambda: process.poll() is not None, what, PULL_S, progress)
        if process.returncode != 0:
            raise CommandFailed(last_lines(log, 1))
    finally:
        process.kill()
        process.wait()
        log.unlink()


@dataclass
class ContainerStarter:
    """Runs the broker of one directory in containers of `image`, on the host's network."""

    directory: BrokerDirectory
    docker: str
    image: str
    heap: tuple[str, str]

    how: ClassVar[How] = "docker"

    def prepare(self, progress: Progress) -> None:
        """Formats an empty data directory. Raises AttemptFailed."""
        arguments = format_arguments(IMAGE_JARS, new_cluster_id(), self.directory.properties)
        try:
            run_command(
                [self.docker, "run", "--rm", *run_options(self.directory), self.image, *arguments],
                "preparing the broker's data directory",
                FORMAT_S,
                progress,
                log=self.directory.path / "format.log",
            )
        except (CommandFailed, WaitTimedOut) as error:
            raise AttemptFailed(
                str(error), f"look into {self.directory.path}; an empty directory may be used"
            ) from error

    def start(self, running: Running) -> tuple[Running, "BrokerContainer"]:
        """Starts the container; its output goes on to the directory's log. Raises AttemptFailed."""
        arguments = server_arguments(IMAGE_JARS, self.directory.properties, self.heap)
        options = ["--detach", *run_options(self.directory)]
        try:
            container = ask(self.docker, "run", *options, self.image, *arguments)
        except CommandFailed as error:
            raise AttemptFailed(f"the container did not start: {error}", ENGINE_FIX) from error
        follow_log(self.docker, container, self.directory.log)
        now = replace(running, pid=None, created_s=None, container=container)
        return now, BrokerContainer(self.docker, container)


def run_options(directory: BrokerDirectory) -> list[str]:
    """As us, in the directory under its own name, with `java` in place of the image's script."""
    user = f"{os.getuid()}:{os.getgid()}"
    label = f"groupstream.directory={directory.path}"
    mount = f"type=bind,source={directory.path},target={directory.path}"
    return [
        *("--network", "host", "--user", user, "--label", label),
        *("--mount", mount, "--entrypoint", "java"),
    ]


def follow_log(docker: str, container: str, log: Path) -> None:
    """Appends the container's output to `log`; the follower ends with the container."""
    with log.open("ab") as output:
        subprocess.Popen(
            [docker, "logs", "--follow", container],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


class BrokerContainer:
    """A container that runs a broker."""

    def __init__(self, docker: str, container: str) -> None:
        self._docker, self._container = docker, container

    def is_running(self) -> bool:
        """False as well when it was removed."""
        state = ["inspect", "--type", "container", "--format", "{{.State.Running}}"]
        try:
            return ask(self._docker, *state, self._container) == "true"
        except CommandFailed:
            return False

    def ask_to_stop(self) -> None:
        self._signal("TERM")

    def kill(self) -> None:
        self._signal("KILL")

    def remove(self) -> None:
        try:
            ask(self._docker, "rm", "--force", "--volumes", self._container)
        except CommandFailed as error:
            if "No such container" not in str(error):
                raise

    def _signal(self, name: str) -> None:
        try:
            ask(self._docker, "kill", "--signal", name, self._container)
        except CommandFailed as error:
            if self.is_running():
                raise CommandFailed(f"the broker's container: {error}") from error


def find_container(running: Running) -> BrokerContainer | None:
    """The container of a directory's record, if it still runs.

    None as well when no engine answers: should the container run on without its engine, then
    Kafka's lock on the data directory refuses a second broker.
    """
    docker = shutil.which("docker")
    if running.container is None or docker is None:
        return None
    container = BrokerContainer(docker, running.container)
    return container if container.is_running() else None
