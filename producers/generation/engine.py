"""vLLM inside this process, with weights that change between two tokens.

        event loop                                     engine thread
    generate() ───── Submit ─▶ commands ──▶ ┌▶ 1. carry out every command that is there
    load_weights() ─ Load ───▶              │  2. one vLLM step: a token for every request
        ▲                                   │  3. hand finished generations back
        └──────── future resolved ◀─────────┴─── (nothing to do: sleep in 1 until a command comes)

Only the engine thread touches vLLM, so a step and a change of weights never overlap, and vLLM's
own record of which version sampled which token is exact. A failure of a step ends the engine:
every call in flight, and every later one, fails with GenerationFailed("infra").
"""

import asyncio
import queue
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from producers.generation.generation import (
    EngineSettings,
    FailureClass,
    Generation,
    GenerationFailed,
    Request,
)
from schemas.errors import ConfigError, DeadlineExceeded
from schemas.vllm_environment import prepare_environment

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine


@dataclass
class _Submit:
    request: Request
    future: Future[Generation]
    version_start: int = -1


@dataclass(frozen=True)
class _Load:
    weights_dir: str
    version: int
    in_flight: bool
    recompute_kv_cache: bool
    future: Future[None]


@dataclass(frozen=True)
class _Abort:
    request_id: str


class _Stop:
    pass


@dataclass
class _Work:
    """What only the engine thread writes."""

    running: dict[str, _Submit] = field(default_factory=dict)
    waiting: list[_Submit] = field(default_factory=list)
    loads: list[_Load] = field(default_factory=list)


class Engine:
    """One vLLM engine. Start it once, then call it from one event loop.

    Every wait has a deadline in seconds; the error says what was waited for.
    """

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[_Submit | _Load | _Abort | _Stop] = queue.SimpleQueue()
        self._work = _Work()
        self._thread: threading.Thread | None = None
        self._ended: str | None = "it was not started"
        self._version = -1
        self._vocab_size = 0
        self._max_model_len = 0
        self._tokens_sampled = 0

    @property
    def version(self) -> int:
        """The policy version whose weights are loaded."""
        return self._version

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def requests_in_flight(self) -> int:
        return len(self._work.running) + len(self._work.waiting)

    @property
    def tokens_sampled(self) -> int:
        """Of finished generations, since the start."""
        return self._tokens_sampled

    async def start(
        self, model_dir: Path | str, settings: EngineSettings, *, version: int, deadline_s: float
    ) -> None:
        """Load the model of `model_dir` (Hugging Face format) as policy `version`.

        Raises ConfigError where vLLM refuses the model, DeadlineExceeded.
        """
        prepare_environment(settings.kv_cache_gib)
        self._version = version
        ready: Future[None] = Future()
        # A daemon: a wedged kernel must not keep a process alive that was told to end.
        self._thread = threading.Thread(
            target=self._run, args=(str(model_dir), settings, ready), name="vllm", daemon=True
        )
        self._thread.start()
        await _within(asyncio.wrap_future(ready), deadline_s, f"vLLM to load {model_dir}")

    async def generate(
        self,
        prompt_token_ids: list[int],
        *,
        request_id: str,
        max_new_tokens: int,
        stop_token_ids: list[int],
        deadline_s: float,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> Generation:
        """Sample one continuation; at the end of the context it stops with "length".

        `request_id` must be unique among the requests in flight. Raises GenerationFailed. A
        cancelled call, and one past its deadline, leaves the engine's batch before its next step.
        """
        request = Request(
            request_id, prompt_token_ids, max_new_tokens, stop_token_ids, temperature, top_p, seed
        )
        self._check(request)
        future: Future[Generation] = Future()
        self._send(_Submit(request, future))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), deadline_s)
        except TimeoutError:
            raise GenerationFailed(
                "infra",
                f"request {request_id}: no answer of up to {max_new_tokens} tokens within "
                f"{deadline_s:g} s, with {self.requests_in_flight} requests in flight",
            ) from None
        finally:
            if future.cancelled():
                self._commands.put(_Abort(request_id))

    async def load_weights(
        self,
        weights_dir: Path | str,
        version: int,
        *,
        deadline_s: float,
        in_flight: bool = True,
        recompute_kv_cache: bool = False,
    ) -> None:
        """Switch to the safetensors of `weights_dir`, between two tokens.

        Requests in flight go on under the new weights, with the keys and values that the old ones
        left, or with `recompute_kv_cache` after a new prefill. Without `in_flight` they are
        finished first, while new ones wait. Raises DeadlineExceeded, and GenerationFailed("infra")
        where vLLM cannot load them: the engine has ended then, for half the weights may be new.
        """
        future: Future[None] = Future()
        self._send(_Load(str(weights_dir), version, in_flight, recompute_kv_cache, future))
        what = f"policy version {version} to load from {weights_dir}"
        await _within(asyncio.wrap_future(future), deadline_s, what)

    async def close(self, *, deadline_s: float) -> None:
        """End the engine; calls in flight fail. Raises DeadlineExceeded."""
        if self._thread is None:
            return
        self._commands.put(_Stop())
        await asyncio.to_thread(self._thread.join, deadline_s)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"the vLLM thread did not end within {deadline_s:g} s")

    def _check(self, request: Request) -> None:
        """Raises GenerationFailed for what vLLM would turn away, in words that name the cause."""
        prompt, who = request.prompt_token_ids, f"request {request.request_id}"
        if self._ended is not None:
            raise GenerationFailed("infra", f"{who}: no engine: {self._ended}")
        if request.max_new_tokens < 1:
            raise GenerationFailed("data", f"{who}: max_new_tokens is {request.max_new_tokens}")
        if not 0 < len(prompt) < self._max_model_len:
            raise GenerationFailed(
                "data",
                f"{who}: the prompt has {len(prompt)} tokens, allowed are 1 to "
                f"{self._max_model_len - 1} (max_model_len {self._max_model_len})",
            )
        if min(prompt) < 0 or max(prompt) >= self._vocab_size:
            raise GenerationFailed(
                "data",
                f"{who}: prompt tokens from {min(prompt)} to {max(prompt)}, the model's vocabulary "
                f"has {self._vocab_size}; do model and tokenizer belong together?",
            )

    def _send(self, command: _Submit | _Load) -> None:
        if self._ended is not None:
            raise GenerationFailed("infra", f"no engine: {self._ended}")
        self._commands.put(command)

    # From here on: the engine thread.

    def _run(self, model_dir: str, settings: EngineSettings, ready: Future[None]) -> None:
        try:
            # Here and not above: the import takes seconds, and must follow prepare_environment().
            from producers.generation import vllm_calls  # noqa: PLC0415

            self._vllm = vllm_calls
            engine = vllm_calls.build_engine(model_dir, settings)
        except Exception as error:
            self._ended = f"vLLM could not load {model_dir}: {error}"
            refused = ConfigError(self._ended)
            refused.__cause__ = error
            ready.set_exception(refused)
            return
        engine.set_weight_version(str(self._version))
        self._max_model_len = engine.model_config.max_model_len
        self._vocab_size = engine.model_config.get_vocab_size()
        self._ended = None
        if ready.set_running_or_notify_cancel():
            ready.set_result(None)
        self._serve(engine)

    def _serve(self, engine: "LLMEngine") -> None:
        reason = "it was closed"
        try:
            while self._carry_out_commands(engine):
                if self._work.running:
                    for output in engine.step():
                        self._finish(output)
        except Exception as error:
            reason = f"vLLM failed: {type(error).__name__}: {error}"
            raise  # the traceback belongs in the log
        finally:
            self._end(reason)
            engine.engine_core.shutdown()

    def _carry_out_commands(self, engine: "LLMEngine") -> bool:
        """False when told to stop. Sleeps while there is nothing to do."""
        work = self._work
        while True:
            self._load_when_allowed(engine)
            if not work.loads:
                for submit in work.waiting:
                    self._admit(engine, submit)
                work.waiting.clear()
            try:
                command = self._commands.get(block=not work.running)
            except queue.Empty:
                return True
            match command:
                case _Stop():
                    return False
                case _Submit():
                    work.waiting.append(command)
                case _Load():
                    work.loads.append(command)
                case _Abort():
                    if work.running.pop(command.request_id, None) is not None:
                        engine.abort_request([command.request_id])

    def _load_when_allowed(self, engine: "LLMEngine") -> None:
        work = self._work
        while work.loads and (work.loads[0].in_flight or not work.running):
            load = work.loads.pop(0)
            if not load.future.set_running_or_notify_cancel():
                continue
            try:
                self._vllm.load_weights(
                    engine, load.weights_dir, str(load.version), load.recompute_kv_cache
                )
            except Exception as error:
                message = f"policy version {load.version} from {load.weights_dir}: {error}"
                load.future.set_exception(GenerationFailed("infra", message))
                raise
            self._version = load.version
            load.future.set_result(None)

    def _admit(self, engine: "LLMEngine", submit: _Submit) -> None:
        if submit.future.cancelled():
            return
        request = submit.request
        if request.request_id in self._work.running:
            _fail(submit.future, f"request id {request.request_id!r} is already in flight", "data")
            return
        # Prompts share cached keys and values only within one version's weights.
        prompt = {"prompt_token_ids": request.prompt_token_ids, "cache_salt": str(self._version)}
        try:
            engine.add_request(request.request_id, prompt, self._vllm.sampling_params(request))
        except ValueError as error:  # vLLM's word for a request that it will never take
            _fail(submit.future, f"request {request.request_id}: {error}", "data")
            return
        submit.version_start = self._version
        self._work.running[request.request_id] = submit

    def _finish(self, output: Any) -> None:
        submit = self._work.running.pop(output.request_id)
        try:
            generation = self._vllm.generation(submit.request, submit.version_start, output)
        except GenerationFailed as error:
            _fail(submit.future, str(error), error.failure_class)
            return
        self._tokens_sampled += len(generation.token_ids)
        if submit.future.set_running_or_notify_cancel():
            submit.future.set_result(generation)

    def _end(self, reason: str) -> None:
        self._ended = reason
        work, self._work = self._work, _Work()
        unfinished: list[_Submit | _Load] = [*work.running.values(), *work.waiting, *work.loads]
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, _Submit | _Load):
                unfinished.append(command)
        for ended in unfinished:
            _fail(ended.future, f"the engine ended: {reason}")


def _fail(future: Future[Any], message: str, failure_class: FailureClass = "infra") -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(GenerationFailed(failure_class, message))


async def _within(wait: Awaitable[None], deadline_s: float, what: str) -> None:
    try:
        await asyncio.wait_for(wait, deadline_s)
    except TimeoutError:
        raise DeadlineExceeded(f"waited {deadline_s:g} s for {what}") from None
