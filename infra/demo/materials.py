"""The demo's model and prompts, made in a process of their own: torch stays out of ours.

That process prints a JSON object a line: {"share": 0 to 1, "text": what happens now}.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import orjson

from schemas.config import Config
from schemas.config_file import load_config
from schemas.errors import DeadlineExceeded, GroupstreamError

ROWS_PER_AGENT = 2000
DEADLINE_S = 600.0
SPEAK_S = 1.0

Note = Callable[[str], None]


class MaterialsFailed(GroupstreamError):
    """The model or the prompts could not be made; the message says why."""


def make_materials(config: Config, config_file: Path, note: Note, stop: threading.Event) -> None:
    """Makes what is not there yet; returns early where `stop` is set.

    Raises MaterialsFailed, DeadlineExceeded.
    """
    if Path(config.policy.model_name).exists() and Path(config.data.train_jsonl_fpath).exists():
        note("the model and the prompts are there already")
        return
    note("making the model and the prompts")
    config.log_directory.mkdir(parents=True, exist_ok=True)
    log_path = config.log_directory / "materials.log"
    command = [sys.executable, "-W", "ignore", "-m", "infra.demo.materials", str(config_file)]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
        )
        threading.Thread(target=_speak, args=(process, note), daemon=True).start()
        try:
            _wait(process, stop)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode != 0 and not stop.is_set():
        last = log_path.read_text(errors="replace").strip().rsplit("\n", 1)[-1]
        raise MaterialsFailed(f"{last} (all of it: {log_path})")


def _wait(process: subprocess.Popen[bytes], stop: threading.Event) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while process.poll() is None and not stop.is_set():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"the model was not made within {DEADLINE_S:.0f} s")
        time.sleep(0.05)


def _speak(process: subprocess.Popen[bytes], note: Note) -> None:
    assert process.stdout is not None
    spoken_s = 0.0
    for line in process.stdout:
        if time.monotonic() - spoken_s >= SPEAK_S:
            spoken_s = time.monotonic()
            said = orjson.loads(line)
            note(f"  {said['share']:4.0%}  {said['text']}")


def _report(share: float, text: str) -> None:
    print(orjson.dumps({"share": share, "text": text}).decode(), flush=True)


def make(config: Config) -> None:
    """In this process. Each is complete or not there at all."""
    from infra.demo_model import DEMO_AGENTS, make_demo_model  # noqa: PLC0415
    from producers.gyms.reasoning_gym_rows import write_dataset  # noqa: PLC0415

    _report(0.0, "writing the prompts")
    seed = config.grpo.seed
    write_dataset(Path(config.data.train_jsonl_fpath), DEMO_AGENTS, ROWS_PER_AGENT, seed)
    make_demo_model(Path(config.policy.model_name), seed=seed, progress=_report)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # so small a model gains nothing from more
    make(load_config(sys.argv[1]))
