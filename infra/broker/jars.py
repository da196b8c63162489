"""Apache Kafka's jars: from Maven Central once, then from the user's cache directory."""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from infra.broker.directory import locked
from infra.broker.errors import AttemptFailed, CommandFailed, WaitTimedOut
from infra.broker.waiting import Progress, run_command

KAFKA_VERSION = "4.4.0"  # pom.xml pins the same; a test compares them
POM = Path(__file__).with_name("pom.xml")
DOWNLOAD_S = 600.0
MAVEN_FIX = (
    "install Maven (Debian: apt-get install maven; macOS: brew install maven); it is needed once, "
    "to fetch Kafka's jars"
)


def cache_directory() -> Path:
    """Where this version's jars are kept: below $XDG_CACHE_HOME, else below ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "groupstream" / f"kafka-{KAFKA_VERSION}"


def set_name() -> str:
    """12 hexadecimal digits that name the set of jars: another pom.xml has others."""
    return hashlib.sha256(POM.read_bytes()).hexdigest()[:12]


def jars(progress: Progress, cache: Path | None = None) -> Path:
    """The directory with the jars, fetched first if need be (46 files, 43 MB).

    Raises AttemptFailed when Maven is missing or fails, WaitTimedOut when another process that
    fetches them does not end.
    """
    cache = cache or cache_directory()
    libs = cache / f"libs-{set_name()}"
    if not libs.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache / "lock", "it fetches Kafka's jars", progress):
            if not libs.exists():
                _fetch(cache, libs, progress)
    return libs


def _fetch(cache: Path, libs: Path, progress: Progress) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        raise AttemptFailed("Maven (mvn) is not on the PATH", MAVEN_FIX)
    progress(f"fetching Apache Kafka {KAFKA_VERSION} from Maven Central into {cache}")
    log = cache / "maven.log"
    with tempfile.TemporaryDirectory(dir=cache, prefix="partial-") as partial:
        fetched = Path(partial) / "libs"
        # --strict-checksums: a damaged download is an error, not a warning
        arguments = [maven, "--batch-mode", "--strict-checksums", "--file", str(POM)]
        arguments += ["dependency:copy-dependencies", f"-DoutputDirectory={fetched}"]
        try:
            run_command(
                arguments,
                "fetching Kafka's jars",
                DOWNLOAD_S,
                progress,
                log=log,
                detail=lambda: f": {_downloads(log)} files so far",
            )
        except (CommandFailed, WaitTimedOut) as error:
            raise AttemptFailed(
                f"Kafka's jars could not be fetched: {error}",
                "let Maven reach Maven Central (a mirror goes into ~/.m2/settings.xml); "
                f"its output is in {log}",
            ) from error
        fetched.rename(libs)  # the set gets its name only when it is complete


def _downloads(log: Path) -> int:
    return log.read_bytes().count(b"Downloaded from") if log.exists() else 0
