"""The broker's server.properties. Pure: one size setting, two ports and a directory in, text out.

A single KRaft node that is broker and controller at once, on 127.0.0.1 alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

MIB = 1 << 20
DEFAULT_RECORD_BYTES = 128 * MIB  # a prompt group of the largest size that must work
MAX_RECORD_BYTES = 1000 * MIB  # Kafka counts a request's bytes in 31 bits, and we allow two records
ENVELOPE_BYTES = MIB  # a record's key, headers (dead letters: 64 KiB) and its batch's framing
BROKER_FETCH_BYTES = 55 * MIB  # Kafka's own default of fetch.max.bytes
DAY_MINUTES = 24 * 60


@dataclass(frozen=True)
class SizeLimits:
    """The broker's size limits in bytes, all derived from the largest record value."""

    message: int
    fetch: int
    request: int

    @classmethod
    def of_record(cls, record_bytes: int) -> "SizeLimits":
        """Raises ValueError outside 1 .. MAX_RECORD_BYTES."""
        if not 1 <= record_bytes <= MAX_RECORD_BYTES:
            raise ValueError(
                f"record_bytes is {record_bytes}; a broker takes 1 to {MAX_RECORD_BYTES} "
                "(Kafka counts a request's bytes in 31 bits): lower the group size limit"
            )
        message = record_bytes + ENVELOPE_BYTES
        return cls(message, max(message, BROKER_FETCH_BYTES), 2 * message)


def server_properties(
    data: Path,
    port: int,
    controller_port: int,
    record_bytes: int,
    proxied: Mapping[int, int] = MappingProxyType({}),
) -> str:
    """The text of server.properties. `data` is an absolute path without line breaks.

    `proxied`: ports that it listens on too, each with the port of a proxy before it; who comes
    through one is told that one's port, and so stays behind it.
    """
    limits = SizeLimits.of_record(record_bytes)
    settings = {
        **_node(data),
        **_listeners(port, controller_port, proxied),
        **_sizes(limits),
        **_groups_and_transactions(),
        **_disk(),
    }
    return "".join(f"{key}={_escaped(str(value))}\n" for key, value in settings.items())


def _escaped(value: str) -> str:
    """As java.util.Properties reads it: Latin-1, a backslash starts an escape."""
    escaped = value.replace("\\", "\\\\").encode("utf-16-be")
    units = (int.from_bytes(escaped[at : at + 2]) for at in range(0, len(escaped), 2))
    return "".join(chr(unit) if unit < 128 else f"\\u{unit:04x}" for unit in units)


def _listeners(port: int, controller_port: int, proxied: Mapping[int, int]) -> dict[str, str | int]:
    listens = {"PLAINTEXT": port} | {f"PROXIED{own}": own for own in proxied}
    named = {"PLAINTEXT": port} | {f"PROXIED{own}": proxy for own, proxy in proxied.items()}
    return {
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "listeners": _addresses(listens | {"CONTROLLER": controller_port}),
        "advertised.listeners": _addresses(named),
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": ",".join(
            f"{name}:PLAINTEXT" for name in ("CONTROLLER", *listens)
        ),
    }


def _addresses(ports: Mapping[str, int]) -> str:
    return ",".join(f"{name}://127.0.0.1:{port}" for name, port in ports.items())


def _node(data: Path) -> dict[str, str | int]:
    return {
        "process.roles": "broker,controller",
        "node.id": 1,
        "log.dirs": str(data),
        "auto.create.topics.enable": "false",  # a mistyped run id must be an error
        "default.replication.factor": 1,
        "min.insync.replicas": 1,
    }


def _sizes(limits: SizeLimits) -> dict[str, str | int]:
    return {
        "message.max.bytes": limits.message,
        "replica.fetch.max.bytes": limits.message,
        "fetch.max.bytes": limits.fetch,
        "socket.request.max.bytes": limits.request,
    }


def _groups_and_transactions() -> dict[str, str | int]:
    return {
        "group.initial.rebalance.delay.ms": 0,
        "group.min.session.timeout.ms": 1000,
        "group.consumer.min.session.timeout.ms": 1000,
        "group.consumer.min.heartbeat.interval.ms": 200,
        "offsets.topic.replication.factor": 1,
        "offsets.topic.num.partitions": 8,
        "offsets.retention.minutes": 30 * DAY_MINUTES,  # a run may rest: its offsets are its state
        "transaction.state.log.replication.factor": 1,
        "transaction.state.log.min.isr": 1,
        "transaction.state.log.num.partitions": 4,
        "transaction.max.timeout.ms": 900_000,
    }


def _disk() -> dict[str, str | int]:
    return {
        "log.segment.delete.delay.ms": 1000,  # 60 s by default: deleted topics hold the disk
        "log.retention.check.interval.ms": 30_000,
        "log.cleaner.threads": 1,
        "log.cleaner.dedupe.buffer.size": 32 * MIB,
    }
