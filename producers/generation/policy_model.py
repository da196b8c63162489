"""The model as a gym sees it: messages or token ids in, a Generation out."""

from dataclasses import dataclass

from producers.generation.engine import Engine
from producers.generation.generation import Generation
from producers.generation.tokens import Tokens


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled; None as budget is what the context leaves."""

    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0


class PolicyModel:
    """Engine, tokenizer and sampling settings of one shard."""

    def __init__(self, engine: Engine, tokens: Tokens, sampling: Sampling) -> None:
        self.tokens = tokens
        self._engine = engine
        self._sampling = sampling

    @property
    def version(self) -> int:
        """The policy version whose weights are loaded."""
        return self._engine.version

    async def sample(
        self,
        prompt_token_ids: list[int],
        *,
        model_call_id: str,
        deadline_s: float,
        max_new_tokens: int | None = None,
    ) -> Generation:
        """One model call. Raises GenerationFailed, for a prompt that fills the context too."""
        context_left = self._engine.max_model_len - len(prompt_token_ids)
        budgets = (max_new_tokens, self._sampling.max_new_tokens, context_left)
        return await self._engine.generate(
            prompt_token_ids,
            request_id=model_call_id,
            max_new_tokens=max(1, min(budget for budget in budgets if budget is not None)),
            stop_token_ids=self.tokens.stop_token_ids,
            deadline_s=deadline_s,
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
        )
