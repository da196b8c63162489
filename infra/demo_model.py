"""The model of the demo: half a million parameters that know one-digit arithmetic, badly.

Made on the spot, in two short supervised phases on the agents' own task format:

1. facts: problems with their right answers, until nearly all are known;
2. confusion: the same problems, but most of the time the answer is that of another sign (3 + 4 = 7
   or -1, 3 * 4 = 12 or 7 or -1). What is left knows how to compute, and guesses what a sign asks.

Which sign asks for what is then learned from the verifier's reward alone. It is a model of this
one task and of nothing else: a fresh copy is right about four times in ten.
"""

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from producers.gyms.reasoning_gym_rows import rows
from schemas.errors import GroupstreamError

_ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
DEMO_AGENTS: dict[str, dict[str, Any]] = {
    "sums": {
        "family": "chain_sum",
        "parameters": _ONE_DIGIT,
        "prompt": "{expression} =",
        "exact": True,
    },
    "products": {
        "family": "products",
        "parameters": _ONE_DIGIT,
        "prompt": "{expression} =",
        "exact": True,
    },
}

EOS, PAD = 0, 1
_SPECIAL = ["<eos>", "<pad>"]

Progress = Callable[[float, str], None]
"""Called with the share done, 0 to 1, and what happens now."""


@dataclass(frozen=True)
class Recipe:
    """Found by experiment; see tests/unit/test_demo_model.py for what it must give."""

    batch_size: int = 64
    learning_rate: float = 2e-3
    lr_warmup_steps: int = 20
    check_every: int = 10
    facts_known: float = 0.85
    max_fact_steps: int = 400
    right_share: float = 0.4
    """Of the answers in the second phase"""
    confusion_steps: int = 40
    max_start: float = 0.5
    """Highest accuracy with which the model may leave the second phase"""


@dataclass(frozen=True)
class DemoModel:
    directory: Path
    accuracy: dict[str, float]
    """Probability of a right sample, for each agent, over fresh problems"""
    parameters: int


class WarmUpFailed(GroupstreamError):
    """The warm-up did not reach its accuracy; the message has the figures."""


def make_demo_model(
    directory: Path, *, seed: int, progress: Progress, recipe: Recipe | None = None
) -> DemoModel:
    """Write a Hugging Face model directory, complete or not at all; a few seconds on two cores.

    Equal seeds give equal weights on one machine. Raises WarmUpFailed.
    """
    recipe = recipe or Recipe()
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(_config())
    warm_up = _WarmUp(model, recipe, seed, progress)
    warm_up.learn_facts()
    accuracy = warm_up.confuse_signs()
    unfinished = directory.with_name(f"{directory.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    _tokenizer().save_pretrained(unfinished)
    shutil.rmtree(directory, ignore_errors=True)
    unfinished.rename(directory)
    progress(1.0, "model written")
    return DemoModel(directory, accuracy, sum(p.numel() for p in model.parameters()))


def _config() -> Qwen2Config:
    return Qwen2Config(
        vocab_size=len(_SPECIAL) + 256,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,  # heads of 32: the smallest that vLLM runs on a CPU
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.08,  # 0.02 learns the same facts in four times the steps
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
        dtype="float32",
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: any text can be a prompt."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<pad>",  # never met; else transformers adds one beyond the vocabulary
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )


class _WarmUp:
    def __init__(
        self, model: Qwen2ForCausalLM, recipe: Recipe, seed: int, progress: Progress
    ) -> None:
        self._model = model
        self._recipe = recipe
        self._progress = progress
        self._random = random.Random(seed)
        self._tokenizer = _tokenizer()
        self._problems = _endless_problems(seed)
        self._fresh = list(rows(DEMO_AGENTS, rows_per_agent=150, seed=seed + 1))
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.99), weight_decay=0.01
        )

    def learn_facts(self) -> None:
        recipe = self._recipe
        for step in range(1, recipe.max_fact_steps + 1):
            for group in self._optimizer.param_groups:
                group["lr"] = recipe.learning_rate * min(1.0, step / recipe.lr_warmup_steps)
            self._step(right_share=1.0)
            if step % recipe.check_every == 0:
                known = min(self.accuracy().values())
                share = 0.8 * min(1.0, known / recipe.facts_known)
                self._progress(share, f"warm-up 1 of 2, facts: {known:.0%} known")
                if known >= recipe.facts_known:
                    return
        raise WarmUpFailed(
            f"only {known:.0%} of the facts known after {step} steps, "
            f"{recipe.facts_known:.0%} wanted; try another seed"
        )

    def confuse_signs(self) -> dict[str, float]:
        """The accuracy with which the model starts into reinforcement learning, by agent."""
        recipe = self._recipe
        for step in range(1, recipe.confusion_steps + 1):
            self._step(recipe.right_share)
            if step % recipe.check_every == 0:
                share = 0.8 + 0.2 * step / recipe.confusion_steps
                self._progress(share, f"warm-up 2 of 2, confusion: step {step}")
        accuracy = self.accuracy()
        if max(accuracy.values()) > recipe.max_start:
            raise WarmUpFailed(
                f"the model starts at {accuracy}, above {recipe.max_start}: there would be little "
                "left to learn; try another seed"
            )
        return accuracy

    @torch.no_grad()
    def accuracy(self) -> dict[str, float]:
        """Probability that a sample at temperature 1 is right, by agent."""
        logprobs, mask = self._answer_logprobs([(row, row["answer"]) for row in self._fresh])
        right = (logprobs * mask).sum(dim=1).exp()
        by_agent: dict[str, list[float]] = {agent: [] for agent in DEMO_AGENTS}
        for row, probability in zip(self._fresh, right.tolist(), strict=True):
            by_agent[row["agent_ref"]["name"]].append(probability)
        return {agent: sum(values) / len(values) for agent, values in by_agent.items()}

    def _step(self, right_share: float) -> None:
        batch = [next(self._problems) for _ in range(self._recipe.batch_size)]
        logprobs, mask = self._answer_logprobs(
            [(row, _given_answer(row, right_share, self._random)) for row in batch]
        )
        loss = -(logprobs * mask).sum() / mask.sum()
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()

    def _answer_logprobs(self, given: list[tuple[dict[str, Any], str]]) -> tuple[Tensor, Tensor]:
        """Logprobs and mask, both [problems, longest - 1]; 1 where an answer's token is due."""
        prompts = [self._encode(row["responses_create_params"]["input"]) for row, _ in given]
        answers = [[*self._encode(answer), EOS] for _, answer in given]
        longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
        ids = torch.full((len(given), longest), PAD)
        mask = torch.zeros((len(given), longest))
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            end = len(prompt) + len(answer)
            ids[i, :end] = torch.tensor(prompt + answer)
            mask[i, len(prompt) : end] = 1
        all_logprobs = torch.log_softmax(self._model(ids[:, :-1]).logits, dim=-1)
        return all_logprobs.gather(-1, ids[:, 1:, None])[..., 0], mask[:, 1:]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text)
        return ids


def _endless_problems(seed: int) -> Iterator[dict[str, Any]]:
    """Two sums for each product: they have twice the facts."""
    for chunk in count():
        found = list(rows(DEMO_AGENTS, rows_per_agent=2000, seed=seed + 2 + chunk))
        sums = [row for row in found if row["agent_ref"]["name"] == "sums"]
        products = [row for row in found if row["agent_ref"]["name"] == "products"]
        for i in range(0, len(sums) - 1, 2):
            yield from (sums[i], sums[i + 1], products[i])


def _given_answer(row: dict[str, Any], right_share: float, chance: random.Random) -> str:
    """The right answer, or else that of another sign; a sum is never taken for a product."""
    if chance.random() < right_share:
        answer: str = row["answer"]
        return answer
    left, sign, right = row["metadata"]["expression"].split(" ")
    others = {"+": int(left) + int(right), "-": int(left) - int(right)}
    others.pop(sign, None)
    return str(chance.choice(list(others.values())))
