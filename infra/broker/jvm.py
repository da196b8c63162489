"""The two Java commands of a Kafka broker. Pure; the same for a local Java and in a container."""

from pathlib import Path

DEFAULT_HEAP = ("256m", "768m")  # -Xms, -Xmx


def format_arguments(classpath: str, cluster_id: str, properties: Path) -> list[str]:
    """What follows `java` to prepare an empty data directory."""
    tool = ["kafka.tools.StorageTool", "format", "--cluster-id", cluster_id]
    return ["-Xmx128m", *_logging(), "-cp", classpath, *tool, "--config", str(properties)]


def server_arguments(classpath: str, properties: Path, heap: tuple[str, str]) -> list[str]:
    """What follows `java` to run the broker. `heap`: the least and the greatest size."""
    least, greatest = heap
    memory = [f"-Xms{least}", f"-Xmx{greatest}", "-XX:+ExitOnOutOfMemoryError"]
    return [*memory, *_logging(), "-cp", classpath, "kafka.Kafka", str(properties)]


def _logging() -> list[str]:
    """Warnings to standard output, for slf4j-simple (our jars) and log4j (apache/kafka's)."""
    simple = "-Dorg.slf4j.simpleLogger."
    return [
        f"{simple}defaultLogLevel=warn",
        f"{simple}showDateTime=true",
        f"{simple}dateTimeFormat=yyyy-MM-dd HH:mm:ss.SSS",
        "-Dorg.apache.logging.log4j.level=WARN",
    ]
