"""A snapshot as Prometheus metrics, on a port of its own."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from infra.monitor.snapshot import Snapshot
from schemas.errors import ConfigError

PREFIX = "groupstream_"
OF_RUN = (
    "step",
    "version",
    "settled_tasks",
    "groups_accepted",
    "open_groups",
    "held_groups",
    "dispatched",
    "abandoned",
    "outstanding",
)
OF_PARTITION = ("committed", "position", "end", "unread", "held", "settled_tasks", "dead_letters")
OF_ROLE = ("since_s", "silent_s", "stalled")


class Exporter(Collector):
    """Serves the newest snapshot that it was shown."""

    def __init__(self) -> None:
        self._snapshot: Snapshot | None = None

    def show(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[GaugeMetricFamily]:
        snapshot = self._snapshot
        if snapshot is not None:
            yield from families_of(snapshot)


def serve(port: int) -> Exporter:
    """Raises ConfigError where the port is taken."""
    exporter = Exporter()
    registry = CollectorRegistry()
    registry.register(exporter)
    try:
        start_http_server(port, registry=registry)
    except OSError as error:
        raise ConfigError(
            f"logger.metrics_port {port} cannot be served ({error.strerror}): choose a free port, "
            "or null"
        ) from error
    return exporter


def families_of(snapshot: Snapshot) -> Iterator[GaugeMetricFamily]:
    """Pure. `groupstream_<name>`, `groupstream_partition_<name>`, `groupstream_role_<name>`."""
    run = snapshot.run_id
    for name in OF_RUN:
        family = GaugeMetricFamily(PREFIX + name, f"{name} of the run", labels=["run"])
        family.add_metric([run], getattr(snapshot, name))
        yield family
    for name in OF_PARTITION:
        family = GaugeMetricFamily(
            f"{PREFIX}partition_{name}",
            f"{name} of a partition of rows",
            labels=["run", "partition"],
        )
        for line in snapshot.partitions:
            family.add_metric([run, str(line.partition)], getattr(line, name))
        yield family
    for name in OF_ROLE:
        family = GaugeMetricFamily(
            f"{PREFIX}role_{name}", f"{name} of a process", labels=["run", "role", "instance"]
        )
        for role in snapshot.roles:
            family.add_metric([run, role.role, role.instance], float(getattr(role, name)))
        yield family
    counters = GaugeMetricFamily(
        f"{PREFIX}counter", "A process's own counter", labels=["run", "role", "instance", "name"]
    )
    for role in snapshot.roles:
        for name, value in role.counters.items():
            counters.add_metric([run, role.role, role.instance, name], value)
    yield counters
