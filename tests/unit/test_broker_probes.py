"""What Java and ldd print, the pinned versions, ports, and waits that end."""

import re
import socket
import sys
import time
from pathlib import Path

import pytest

from infra.broker.directory import new_cluster_id
from infra.broker.errors import CommandFailed, WaitTimedOut
from infra.broker.image import needed
from infra.broker.jars import KAFKA_VERSION, POM
from infra.broker.local_java import java_version
from infra.broker.ports import free_port, is_free
from infra.broker.waiting import run_command, wait_until


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime', 17),
        ('Picked up JAVA_TOOL_OPTIONS: -Dx\njava version "1.8.0_292"', 8),
        ('openjdk version "25" 2025-09-16', 25),
        ("The operation couldn't be completed.", 0),
    ],
)
def test_java_says_its_version_in_several_ways(text: str, version: int):
    assert java_version(text) == version


def test_ldd_names_libraries_the_loader_and_what_is_missing():
    text = (
        "\tlinux-vdso.so.1 (0x00007ffc)\n"
        "\tlibz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x00007f01)\n"
        "\tlibjvm.so => not found\n"
        "\t/lib64/ld-linux-x86-64.so.2 (0x00007f02)\n"
    )
    assert list(needed(text)) == [
        Path("/lib/x86_64-linux-gnu/libz.so.1"),
        Path("/lib64/ld-linux-x86-64.so.2"),
    ]


def test_the_pom_pins_the_version_that_the_messages_name():
    pinned = re.findall(r"<artifactId>([^<]+)</artifactId>\s*<version>([^<]+)<", POM.read_text())
    versions = dict(pinned)
    assert versions["kafka_2.13"] == KAFKA_VERSION
    assert versions["slf4j-simple"] == versions["slf4j-api"]  # else the broker logs nothing


def test_a_port_is_not_free_while_somebody_listens():
    port = free_port()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        assert not is_free(port)
    assert is_free(port)


def test_cluster_ids_never_look_like_an_option():
    ids = {new_cluster_id() for _ in range(500)}
    assert len(ids) == 500
    assert all(len(text) == 22 and text[0] != "-" for text in ids)


def test_a_wait_reports_and_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("infra.broker.waiting.REPORT_EVERY_S", 0.1)
    lines: list[str] = []
    with pytest.raises(WaitTimedOut, match=r"waiting for x: not within 0\.4 s"):
        wait_until(lambda: False, "waiting for x", 0.4, lines.append)
    assert lines
    assert all(line.startswith("waiting for x (") for line in lines)


def test_a_program_that_fails_is_quoted(tmp_path: Path):
    command = [sys.executable, "-c", "print('no space left'); raise SystemExit(3)"]
    with pytest.raises(CommandFailed, match=r"code 3: no space left"):
        run_command(command, "copying", 20, print, log=tmp_path / "log")


def test_a_program_that_is_missing_is_named(tmp_path: Path):
    with pytest.raises(CommandFailed, match="no-such-program"):
        run_command(["no-such-program"], "copying", 5, print, log=tmp_path / "log")


def test_a_program_that_does_not_end_is_killed(tmp_path: Path):
    started_s = time.monotonic()
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(WaitTimedOut, match=r"copying: not within 0\.3 s"):
        run_command(command, "copying", 0.3, print, log=tmp_path / "log")
    assert time.monotonic() - started_s < 10
