"""Builds a container image with Kafka where none can be pulled: no registry, no base image.

Its root is a Java runtime that jlink makes, the system libraries that this runtime needs, and
Kafka's jars: 140 MB. It holds no shell; a container runs `java` itself.
"""

import platform
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from infra.broker.errors import AttemptFailed
from infra.broker.jars import KAFKA_VERSION, jars, set_name
from infra.broker.local_java import JAVA_FIX, find_java
from infra.broker.waiting import Progress, run_command

LOCAL_IMAGE = f"groupstream/kafka:{KAFKA_VERSION}-{set_name()}"
STEP_S = 180.0
LDD_S = 20.0
# java.se is the whole standard; Kafka also asks for the operating system's metrics, Unsafe, and
# zip file systems
MODULES = "java.se,jdk.management,jdk.unsupported,jdk.crypto.ec,jdk.zipfs"
JAVA, LIBS, TEMPORARY = "opt/java", "opt/kafka/libs", "tmp"


def build_image(docker: str, image: str, progress: Progress) -> None:
    """Imports `image` into the engine; about 10 s.

    Raises AttemptFailed without Linux, a JDK or the jars, CommandFailed, WaitTimedOut.
    """
    if platform.system() != "Linux":
        raise AttemptFailed("the image can be built on Linux only", "use Java without Docker")
    jlink = find_jlink()
    libs = jars(progress)
    with tempfile.TemporaryDirectory(prefix="groupstream-image-") as name:
        work = Path(name)
        root, archive = work / "root", work / "root.tar"
        root.mkdir()
        _link_java(jlink, root, work / "jlink.log", progress)
        shutil.copytree(libs, root / LIBS)
        (root / TEMPORARY).mkdir()
        for library in _system_libraries(root / JAVA):
            _copy_to_same_place(library, root)
        progress(f"importing {image} into the Docker engine")
        with tarfile.open(archive, "w") as file:
            file.add(root, arcname=".", filter=_of_root)
        changes = [f"ENV PATH=/{JAVA}/bin", 'ENTRYPOINT ["java"]']
        options = [part for change in changes for part in ("--change", change)]
        arguments = [docker, "import", *options, str(archive), image]
        run_command(arguments, f"importing {image}", STEP_S, progress, log=work / "import.log")


def find_jlink() -> Path:
    """Raises AttemptFailed when there is no Java, or one without its development tools."""
    java = Path(find_java()).resolve()
    jlink = java.with_name("jlink")
    if not jlink.exists():
        raise AttemptFailed(f"{java} has no jlink beside it: it is a JRE, not a JDK", JAVA_FIX)
    return jlink


def _link_java(jlink: Path, root: Path, log: Path, progress: Progress) -> None:
    sizes = ["--strip-debug", "--no-header-files", "--no-man-pages"]
    arguments = [str(jlink), "--add-modules", MODULES, *sizes, "--output", str(root / JAVA)]
    run_command(arguments, "making a Java runtime for the image", STEP_S, progress, log=log)


def _system_libraries(java: Path) -> set[Path]:
    """Every library outside `java` that its programs and libraries load."""
    programs = [path for path in (java / "bin").iterdir() if _is_elf(path)]
    found = set[Path]()
    for path in [*programs, *java.rglob("*.so")]:
        # a library that names its neighbours only is found by its program: ldd's code is no matter
        answer = subprocess.run(
            ["ldd", path], capture_output=True, text=True, timeout=LDD_S, check=False
        )
        found.update(library for library in needed(answer.stdout) if java not in library.parents)
    name_service = [one for lib in found for one in lib.parent.glob("libnss_[fd]*.so.2")]
    return found.union(name_service)


def needed(ldd: str) -> Iterator[Path]:
    """The paths in ldd's output: `name => path (address)`, and the loader as `path (address)`."""
    for line in ldd.splitlines():
        match = re.match(r"\s*(?:\S+ => )?(/\S+) \(0x", line)
        if match:
            yield Path(match.group(1))


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _copy_to_same_place(library: Path, root: Path) -> None:
    target = root / library.relative_to("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(library, target)  # follows links: the loader asks for the link's name


def _of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Owned by root; /tmp is everybody's, since a container runs under the caller's user id."""
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    if member.name == f"./{TEMPORARY}":
        member.mode = 0o1777
    elif member.isdir():
        member.mode = 0o755
    return member
