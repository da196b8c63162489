"""The real vLLM with a tiny model: one engine for the whole file, closed by its last test."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from producers.generation.engine import Engine, EngineSettings
from producers.generation.generation import Generation, GenerationFailed
from schemas.errors import ConfigError

VOCABULARY = 300
STOP = 299
DEADLINE_S = 300.0
PROMPTS = [[5, 6, 7], list(range(40)), [250], [9] * 33]


def _model(directory: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.1,  # wide enough for probabilities that differ
        bos_token_id=None,
        eos_token_id=STOP,
        pad_token_id=STOP,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [_model(root / "a", 1), _model(root / "b", 2)]


@pytest.fixture(scope="module")
def engine(models: list[Path]) -> Engine:
    started = Engine()
    settings = EngineSettings(max_model_len=400, precision="float32", max_num_seqs=16)
    asyncio.run(started.start(models[0], settings, version=0, deadline_s=DEADLINE_S))
    return started


async def sample(engine: Engine, prompt: list[int], name: str, **changes: object) -> Generation:
    arguments = {"max_new_tokens": 40, "stop_token_ids": [STOP], "deadline_s": DEADLINE_S}
    return await engine.generate(prompt, request_id=name, **{**arguments, **changes})


async def reach(engine: Engine, models: list[Path], target: int) -> int:
    """Load model `target` under the next version, with nothing in flight."""
    version = engine.version + 1
    await engine.load_weights(models[target], version, deadline_s=DEADLINE_S)
    return version


def reference(model_dir: Path, generation: Generation, temperature: float = 1.0) -> np.ndarray:
    """[tokens] Hugging Face's float32 log-probabilities of what was sampled."""
    model = Qwen2ForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ids = torch.tensor([generation.prompt_token_ids + generation.token_ids.tolist()])
    with torch.no_grad():
        all_logprobs = torch.log_softmax(model(ids).logits[0, :-1] / temperature, dim=-1)
    start = len(generation.prompt_token_ids) - 1
    taken = ids[0, 1:].unsqueeze(-1)
    return all_logprobs.gather(-1, taken)[start:, 0].numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_hugging_face(engine, models, temperature):
    async def run() -> list[Generation]:
        await reach(engine, models, 0)
        calls = [
            sample(engine, prompt, f"p{i}", temperature=temperature)
            for i, prompt in enumerate(PROMPTS)
        ]
        return await asyncio.gather(*calls)

    for generation in asyncio.run(run()):
        assert generation.logprobs.dtype == np.float32
        assert generation.token_ids.dtype == np.int32
        assert (generation.finish_reason == "stop") == (generation.token_ids[-1] == STOP)
        assert generation.version_start == generation.version_end == engine.version
        expected = reference(models[0], generation, temperature)
        np.testing.assert_allclose(generation.logprobs, expected, atol=1e-5)


def test_requests_in_flight_go_on_under_new_weights(engine, models):
    """With recompute_kv_cache each token's logprob is exactly that of its own version."""

    async def run() -> tuple[int, int, list[Generation]]:
        old = await reach(engine, models, 0)
        calls = [
            asyncio.ensure_future(
                sample(engine, prompt, f"f{i}", max_new_tokens=300, stop_token_ids=[])
            )
            for i, prompt in enumerate(PROMPTS)
        ]
        await asyncio.sleep(0.2)
        new = old + 1
        await engine.load_weights(models[1], new, deadline_s=DEADLINE_S, recompute_kv_cache=True)
        assert not any(call.done() for call in calls), "too fast: nothing was in flight"
        return old, new, await asyncio.gather(*calls)

    old, new, generations = asyncio.run(run())
    for generation in generations:
        assert (generation.version_start, generation.version_end) == (old, new)
        first, second = generation.versions
        assert (first.version, second.version) == (old, new)
        assert (first.start, first.end, second.end) == (0, second.start, 300)
        under_old, under_new = (reference(model, generation) for model in models)
        expected = np.concatenate([under_old[: first.end], under_new[first.end :]])
        np.testing.assert_allclose(generation.logprobs, expected, atol=1e-5)
        assert np.abs(under_old - under_new).max() > 0.1, "the two models agree: no test"


def test_a_kept_kv_cache_never_reaches_a_new_request(engine, models):
    """The same prompt again, after new weights came while its first call was still running."""
    prompt = list(range(100, 200))

    async def run() -> tuple[Generation, Generation]:
        old = await reach(engine, models, 0)
        running = asyncio.ensure_future(
            sample(engine, prompt, "old", max_new_tokens=290, stop_token_ids=[])
        )
        await asyncio.sleep(0.1)
        await engine.load_weights(models[1], old + 1, deadline_s=DEADLINE_S)
        fresh = await sample(engine, prompt, "new")
        assert not running.done()
        return await running, fresh

    crossed, fresh = asyncio.run(run())
    assert crossed.version_end == crossed.version_start + 1 == fresh.version_start
    np.testing.assert_allclose(fresh.logprobs, reference(models[1], fresh), atol=1e-5)


def test_without_in_flight_updates_requests_end_first(engine, models):
    async def run() -> tuple[Generation, Generation]:
        old = await reach(engine, models, 0)
        running = asyncio.ensure_future(
            sample(engine, [1], "before", max_new_tokens=200, stop_token_ids=[])
        )
        await asyncio.sleep(0.05)
        load = asyncio.ensure_future(
            engine.load_weights(models[1], old + 1, deadline_s=DEADLINE_S, in_flight=False)
        )
        await asyncio.sleep(0.05)
        after = asyncio.ensure_future(sample(engine, [1], "after", max_new_tokens=5))
        before = await running
        await load
        return before, await after

    before, after = asyncio.run(run())
    assert before.version_start == before.version_end == after.version_start - 1
    assert [span.version for span in before.versions] == [before.version_end]
    np.testing.assert_allclose(after.logprobs, reference(models[1], after), atol=1e-5)


def test_a_seed_repeats_a_generation(engine):
    async def run() -> list[list[int]]:
        calls = [sample(engine, [3, 4], f"s{i}", seed=seed) for i, seed in enumerate((7, 7, 8))]
        return [generation.token_ids.tolist() for generation in await asyncio.gather(*calls)]

    first, again, other = asyncio.run(run())
    assert first == again != other


def test_a_deadline_ends_the_call_and_frees_its_place(engine):
    async def run() -> None:
        with pytest.raises(GenerationFailed, match=r"within 0\.05 s") as caught:
            await sample(
                engine, [1], "late", max_new_tokens=390, stop_token_ids=[], deadline_s=0.05
            )
        assert caught.value.failure_class == "infra"
        async with asyncio.timeout(DEADLINE_S):
            while engine.requests_in_flight:  # noqa: ASYNC110  only the engine's thread knows
                await asyncio.sleep(0.01)
        await sample(engine, [1], "late")  # its id is free again

    asyncio.run(run())


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "0 tokens"), ([1] * 400, "400 tokens"), ([VOCABULARY], "vocabulary has 300")],
)
def test_a_prompt_that_cannot_work_is_a_data_failure(engine, prompt, message):
    with pytest.raises(GenerationFailed, match=message) as caught:
        asyncio.run(sample(engine, prompt, "bad"))
    assert caught.value.failure_class == "data"


def test_the_context_ends_a_generation_with_length(engine):
    generation = asyncio.run(
        sample(engine, [1] * 395, "long", max_new_tokens=50, stop_token_ids=[])
    )
    assert (generation.finish_reason, len(generation.token_ids)) == ("length", 5)


def test_nan_logprobs_are_refused(engine, models, tmp_path):
    weights = load_file(models[0] / "model.safetensors")
    save_file(
        {name: torch.full_like(value, float("nan")) for name, value in weights.items()},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )

    async def run() -> None:
        broken = engine.version + 1
        await engine.load_weights(tmp_path, broken, deadline_s=DEADLINE_S)
        with pytest.raises(GenerationFailed, match=f"nan, under policy version {broken}") as caught:
            await sample(engine, [1], "nan")
        assert caught.value.failure_class == "data"
        await reach(engine, models, 0)

    asyncio.run(run())


def test_a_directory_without_a_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match=str(tmp_path)):
        asyncio.run(
            Engine().start(
                tmp_path, EngineSettings(max_model_len=64), version=0, deadline_s=DEADLINE_S
            )
        )


def test_closing_fails_what_is_in_flight(engine):
    async def run() -> None:
        running = asyncio.ensure_future(
            sample(engine, [1], "last", max_new_tokens=390, stop_token_ids=[])
        )
        await asyncio.sleep(0.05)
        await engine.close(deadline_s=DEADLINE_S)
        with pytest.raises(GenerationFailed, match="it was closed"):
            await running
        with pytest.raises(GenerationFailed, match="no engine: it was closed"):
            await sample(engine, [1], "later")

    asyncio.run(run())
