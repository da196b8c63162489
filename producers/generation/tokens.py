"""Text to token ids and back, with the model directory's own tokenizer."""

from pathlib import Path
from typing import Any, cast

from schemas.errors import ConfigError, DatasetError

Message = dict[str, Any]


class Tokens:
    """The tokenizer of a model directory; raises ConfigError where it cannot be loaded."""

    def __init__(self, model_dir: Path | str) -> None:
        # Here and not above: the import takes seconds, and a gym without a model needs none of it.
        from transformers import AutoTokenizer  # noqa: PLC0415

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"no usable tokenizer in {model_dir}: {error}") from error
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(f"the tokenizer in {model_dir} has no eos_token: nothing ends a row")

    @property
    def stop_token_ids(self) -> list[int]:
        return [cast(int, self._tokenizer.eos_token_id)]

    @property
    def pad_token_id(self) -> int:
        """The tokenizer's pad token, or its end token where it has none."""
        pad = self._tokenizer.pad_token_id
        return self.stop_token_ids[0] if pad is None else cast(int, pad)

    def prompt_ids(self, messages: list[Message]) -> list[int]:
        """Token ids up to where the model speaks.

        With the tokenizer's chat template if it has one, else the messages' text, joined by lines.
        """
        if self._tokenizer.chat_template:
            text = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        else:
            text = "\n".join(message["content"] for message in messages)
        return cast("list[int]", self._tokenizer.encode(text, add_special_tokens=False))

    def text(self, token_ids: Any) -> str:
        """The text of sampled token ids [tokens], without special tokens."""
        return cast(str, self._tokenizer.decode(token_ids, skip_special_tokens=True))


def messages_of(row: dict[str, Any]) -> list[Message]:
    """The messages of a NeMo Gym row: `responses_create_params.input` is text or a list of them.

    Raises DatasetError.
    """
    params = row.get("responses_create_params")
    if not isinstance(params, dict) or "input" not in params:
        raise DatasetError("a row has no responses_create_params.input")
    given = params["input"]
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise DatasetError("responses_create_params.input is neither text nor a list of messages")
    return [{"role": m["role"], "content": _text_of(m["content"])} for m in given]


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)
