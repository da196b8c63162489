"""A teacher behind an OpenAI-compatible server: its completions API echoes a prompt's logprobs."""

import os
import time

import httpx

from consumers.teachers.teacher import TeacherFailed, as_bytes
from schemas.config import TeacherConfig
from schemas.errors import ConfigError
from schemas.vectors import tokens

CONNECT_S = 10.0
SHOWN_CHARS = 300


class EndpointTeacher:
    def __init__(self, config: TeacherConfig) -> None:
        """Raises ConfigError where the key's environment variable is not set."""
        self._config = config
        self._url = f"{(config.base_url or '').rstrip('/')}/completions"
        headers = {}
        if config.api_key_env is not None:
            key = os.environ.get(config.api_key_env)
            if not key:
                raise ConfigError(
                    f"teachers: the environment variable {config.api_key_env} of "
                    f"{config.base_url} is not set; set it for the assemblers, or leave "
                    "api_key_env out"
                )
            headers["Authorization"] = f"Bearer {key}"
        timeout = httpx.Timeout(config.timeout_s, connect=min(CONNECT_S, config.timeout_s))
        self._client = httpx.Client(headers=headers, timeout=timeout, trust_env=False)

    def start(self) -> None:
        """It is asked when the first group is complete: it may well start after us."""

    def logprobs(self, sequences: list[bytes]) -> list[bytes]:
        prompts = [tokens(sequence).tolist() for sequence in sequences]
        answer = self._answer(prompts)
        try:
            choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
            found = [choice["logprobs"]["token_logprobs"] for choice in choices]
            if len(found) != len(prompts):
                raise TeacherFailed(
                    f"{self._url} gave {len(found)} choices for {len(prompts)} prompts",
                    may_pass=False,
                )
            return [
                as_bytes(each, len(prompt)) for each, prompt in zip(found, prompts, strict=True)
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise TeacherFailed(
                f"{self._url} gave no choices with logprobs.token_logprobs, {error!r} in "
                f"{answer.text[:SHOWN_CHARS]}: it must support echo with logprobs in its "
                "completions API, as vLLM does",
                may_pass=False,
            ) from error

    def close(self) -> None:
        self._client.close()

    def _answer(self, prompts: list[list[int]]) -> httpx.Response:
        """Read to its end. Raises TeacherFailed."""
        body = {
            "model": self._config.model_name,
            "prompt": prompts,
            "echo": True,
            "max_tokens": 0,
            "logprobs": 0,  # of the token itself, and of no other one
            "temperature": 1.0,
        }
        end = time.monotonic() + self._config.timeout_s
        try:
            with self._client.stream("POST", self._url, json=body) as response:
                parts = []
                for part in response.iter_bytes():  # a server that trickles hangs too
                    parts.append(part)
                    if time.monotonic() > end:
                        raise httpx.ReadTimeout(f"no end within {self._config.timeout_s:g} s")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise TeacherFailed(
                f"{self._url}: {type(error).__name__}: {error}",
                may_pass=isinstance(error, httpx.TransportError),
            ) from error
        answer = httpx.Response(response.status_code, content=b"".join(parts))
        if answer.status_code != httpx.codes.OK:
            raise TeacherFailed(
                f"{self._url} answered {answer.status_code}: {answer.text[:SHOWN_CHARS]}",
                may_pass=answer.is_server_error
                or answer.status_code
                in (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.REQUEST_TIMEOUT),
            )
        return answer
