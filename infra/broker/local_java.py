"""A broker as a Java process of this machine."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import psutil

from infra.broker.broker import How
from infra.broker.directory import BrokerDirectory, Running, new_cluster_id
from infra.broker.errors import AttemptFailed, CommandFailed, WaitTimedOut
from infra.broker.jvm import format_arguments, server_arguments
from infra.broker.process import BrokerProcess
from infra.broker.waiting import Progress, run_command

LEAST_JAVA = 17
ASK_JAVA_S = 20.0
FORMAT_S = 60.0
JAVA_FIX = (
    f"install Java {LEAST_JAVA} or later (Debian: apt-get install default-jdk-headless maven; "
    "macOS: brew install openjdk maven), or set JAVA_HOME"
)


def find_java() -> str:
    """The path of a Java that Kafka can run on. Raises AttemptFailed."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None:
        raise AttemptFailed("java is not on the PATH and JAVA_HOME is not set", JAVA_FIX)
    try:
        answer = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=ASK_JAVA_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise AttemptFailed(f"{java} does not run: {error}", JAVA_FIX) from error
    version = java_version(answer.stderr + answer.stdout)
    if version < LEAST_JAVA:
        raise AttemptFailed(
            f"{java} is Java {version or 'of an unknown version'}, Kafka needs {LEAST_JAVA}",
            JAVA_FIX,
        )
    return java


def java_version(text: str) -> int:
    """The feature version in the output of `java -version`; 0 when there is none.

    Java 8 calls itself 1.8.
    """
    match = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(match.group(1)) if match else 0


@dataclass
class JavaStarter:
    """Runs the broker of one directory under `java`, with the jars in `libs`."""

    directory: BrokerDirectory
    java: str
    libs: Path
    heap: tuple[str, str]

    how: ClassVar[How] = "java"

    def prepare(self, progress: Progress) -> None:
        """Formats an empty data directory. Raises AttemptFailed."""
        arguments = format_arguments(self._classpath, new_cluster_id(), self.directory.properties)
        try:
            run_command(
                [self.java, *arguments],
                "preparing the broker's data directory",
                FORMAT_S,
                progress,
                log=self.directory.path / "format.log",
            )
        except (CommandFailed, WaitTimedOut) as error:
            raise AttemptFailed(
                str(error), f"look into {self.directory.path}; an empty directory may be used"
            ) from error

    def start(self, running: Running) -> tuple[Running, BrokerProcess]:
        """Starts the process in a session of its own: Ctrl-C in the terminal is not for it."""
        arguments = server_arguments(self._classpath, self.directory.properties, self.heap)
        with self.directory.log.open("ab") as log:
            process = psutil.Popen(
                [self.java, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.directory.path,
            )
        created_s = process.create_time()
        now = replace(running, pid=process.pid, created_s=created_s, container=None)
        return now, BrokerProcess(process)

    @property
    def _classpath(self) -> str:
        return str(self.libs / "*")
