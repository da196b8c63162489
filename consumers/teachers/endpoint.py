"""A teacher behind an OpenAI-compatible server: its completions API echoes a prompt's logprobs."""

import os
from typing import Any

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
        choices = self._choices(prompts)
        if len(choices) != len(prompts):
            raise TeacherFailed(
                f"{self._url} gave {len(choices)} choices for {len(prompts)} prompts",
                may_pass=False,
            )
        in_order = sorted(choices, key=lambda choice: choice["index"])
        return [
            as_bytes(_token_logprobs(choice), len(prompt))
            for choice, prompt in zip(in_order, prompts, strict=True)
        ]

    def close(self) -> None:
        self._client.close()

    def _choices(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        body = {
            "model": self._config.model_name,
            "prompt": prompts,
            "echo": True,
            "max_tokens": 0,
            "logprobs": 0,  # of the token itself, and of no other one
            "temperature": 1.0,
        }
        try:
            response = self._client.post(self._url, json=body)
        except httpx.HTTPError as error:
            raise TeacherFailed(
                f"{self._url}: {type(error).__name__}: {error}", may_pass=True
            ) from error
        if response.status_code != httpx.codes.OK:
            raise TeacherFailed(
                f"{self._url} answered {response.status_code}: {response.text[:SHOWN_CHARS]}",
                may_pass=response.is_server_error
                or response.status_code
                in (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.REQUEST_TIMEOUT),
            )
        try:
            return list(response.json()["choices"])
        except (ValueError, KeyError, TypeError) as error:
            raise TeacherFailed(
                f"{self._url} answered without choices: {response.text[:SHOWN_CHARS]}",
                may_pass=False,
            ) from error


def _token_logprobs(choice: dict[str, Any]) -> list[float | None]:
    try:
        return list(choice["logprobs"]["token_logprobs"])
    except (KeyError, TypeError) as error:
        raise TeacherFailed(
            "the server gave no logprobs.token_logprobs: it must support echo with logprobs in "
            "its completions API, as vLLM does",
            may_pass=False,
        ) from error
