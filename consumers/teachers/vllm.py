"""A teacher that is a model directory: the near end of `vllm_process`."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from consumers.teachers.frames import PipeClosed, PipeSilent, read_frame, write_frame
from consumers.teachers.teacher import TeacherFailed, as_bytes
from consumers.teachers.vllm_process import Answered, VllmSettings
from schemas.config import TeacherConfig
from schemas.errors import ConfigError
from schemas.vectors import TOKEN_DTYPE

START_S = 600.0  # a large model from a slow disk
END_S = 10.0
SHOWN_LINES = 15

log = logging.getLogger(__name__)


class VllmTeacher:
    """`log_path` gets what vLLM prints."""

    def __init__(
        self, alias: str, config: TeacherConfig, *, max_tokens: int, log_path: Path
    ) -> None:
        """Raises ConfigError where there is no model directory."""
        self._alias, self._config, self._log_path = alias, config, log_path
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        directory = Path(config.model_name).absolute()
        if not (directory / "config.json").is_file():
            raise ConfigError(
                f"teachers.models.{alias}.model_name: {directory} has no config.json; give the "
                "directory of a Hugging Face model, or a base_url"
            )
        engine = config.vllm_cfg
        self._settings = VllmSettings(
            model_dir=str(directory),
            max_tokens=engine.max_model_len or max_tokens,
            precision=engine.precision,
            tensor_parallel_size=engine.tensor_parallel_size,
            gpu_memory_utilization=engine.gpu_memory_utilization,
            enforce_eager=engine.enforce_eager,
            max_num_seqs=engine.max_num_seqs,
            kv_cache_gib=engine.kv_cache_gib,
        )

    def start(self) -> None:
        """Raises ConfigError with vLLM's last words where it can't load the model."""
        try:
            self._started()
        except TeacherFailed as error:
            raise ConfigError(f"teachers.models.{self._alias}: {error}") from error

    def logprobs(self, sequences: list[bytes]) -> list[bytes]:
        process = self._started()
        answer = self._asked(process, sequences)
        if answer.error:
            raise TeacherFailed(f"teacher {self._alias}: {answer.error}", may_pass=False)
        lengths = [len(sequence) // TOKEN_DTYPE.itemsize for sequence in sequences]
        return list(map(as_bytes, answer.logprobs, lengths))

    def close(self) -> None:
        self._is_closed = True
        process = self._process
        if process is not None:
            _kill(process)  # whoever waits for its answer sees the pipe's end

    def _started(self) -> subprocess.Popen[bytes]:
        """The process, ready; a new one where the last one died. Raises TeacherFailed."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        if self._is_closed:
            raise TeacherFailed(f"teacher {self._alias} was closed", may_pass=False)
        log.info("teacher %s: vLLM loads %s", self._alias, self._settings.model_dir)
        settings = msgspec.json.encode(self._settings).decode()
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as printed:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "consumers.teachers.vllm_process", settings],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                start_new_session=True,  # Ctrl-C is for the assembler, which then ends it
            )
        self._read(self._process, START_S, f"to load {self._settings.model_dir}")
        return self._process

    def _asked(self, process: subprocess.Popen[bytes], sequences: list[bytes]) -> Answered:
        assert process.stdin is not None
        try:
            write_frame(process.stdin.fileno(), sequences, self._config.timeout_s)
        except BrokenPipeError as error:
            raise self._gone(process) from error
        except PipeSilent as error:
            self._end()
            raise TeacherFailed(
                f"teacher {self._alias} did not take {len(sequences)} sequences within "
                f"{self._config.timeout_s:g} s",
                may_pass=True,
            ) from error
        return self._read(process, self._config.timeout_s, f"to score {len(sequences)} sequences")

    def _read(self, process: subprocess.Popen[bytes], deadline_s: float, what: str) -> Answered:
        assert process.stdout is not None
        try:
            return msgspec.convert(read_frame(process.stdout.fileno(), deadline_s), Answered)
        except PipeClosed as error:
            raise self._gone(process) from error
        except PipeSilent as error:
            self._end()  # its answer, if it ever came, would be taken for that of the next request
            raise TeacherFailed(
                f"teacher {self._alias} took more than {deadline_s:g} s {what}", may_pass=True
            ) from error

    def _gone(self, process: subprocess.Popen[bytes]) -> TeacherFailed:
        self._end()
        return TeacherFailed(
            f"teacher {self._alias}: vLLM ended with {process.returncode}; the end of "
            f"{self._log_path}:\n{self._last_words()}",
            may_pass=True,
        )

    def _end(self) -> None:
        process = self._process
        if process is None:
            return
        _kill(process)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        self._process = None

    def _last_words(self) -> str:
        lines = self._log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-SHOWN_LINES:])


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """With its tensor-parallel workers: it has a session of its own, and nothing to finish."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        log.warning("process %d is still there %.0f s after SIGKILL", process.pid, END_S)
