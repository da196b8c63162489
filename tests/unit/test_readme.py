"""What README.md shows is what there is: its gym runs, its files load, its commands exist."""

import asyncio
import importlib
import importlib.util
import re
import sys
import tomllib

import numpy as np
import pytest
import typer.main
import yaml

from infra.cli.gym_shard import require_replica
from infra.demo.settings import parse_settings
from producers.dataset import Dataset
from producers.generation.generation import Generation, GenerationFailed, VersionSpan
from producers.generation.policy_model import PolicyModel, Sampling
from producers.gyms.protocol import load_gym
from producers.row import RowOptions, rollout_request, rollout_row
from schemas.config import Config
from schemas.config_file import load_config
from schemas.records import RolloutRow
from schemas.validation import check_row
from schemas.vectors import tokens
from tests.prompts import make_group
from tests.readme import ROOT, blocks, commands, inline_code, links
from tests.rows import make_manifest, make_started

SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
MAKEFILE = (ROOT / "Makefile").read_text()
COMMANDS = commands()
CONFIGURATIONS = [
    part
    for part in map(yaml.safe_load, blocks("yaml"))
    if set(part) & set(Config.model_fields)  # not some other program's
]
MANIFEST = make_manifest()


class Letters:
    """A tokenizer with a token a character; 0 ends an answer."""

    stop_token_ids = (0,)
    pad_token_id = 0

    def prompt_ids(self, messages):
        return [ord(letter) for letter in messages[-1]["content"]]

    def text(self, token_ids):
        return "".join(chr(token) for token in token_ids if token)


class LongerAndLonger:
    """An engine whose n-th answer has 10 n letters and comes the sooner; one of them may fail."""

    version = 3
    max_model_len = 512

    def __init__(self, fails=None):
        self.answers = []
        self._fails = fails

    async def generate(self, prompt_token_ids, *, request_id, max_new_tokens, **_):
        number = len(self.answers)
        answer = np.array([ord("x")] * (10 * number) + [0], dtype=np.int32)[:max_new_tokens]
        self.answers.append((request_id, [*prompt_token_ids, *answer]))
        await asyncio.sleep(0.05 / (1 + number))
        if number == self._fails:
            raise GenerationFailed("infra", "the engine ended")
        return Generation(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            token_ids=answer,
            logprobs=np.full(len(answer), -0.5, dtype=np.float32),
            finish_reason="stop",
            version_start=self.version,
            version_end=self.version,
            versions=[VersionSpan(0, len(answer), self.version)],
        )


@pytest.fixture
def config_file(tmp_path):
    """The block that is a whole file, as a file."""
    (text,) = [code for code in blocks("yaml") if code.startswith("run:")]
    path = tmp_path / "readme.yaml"
    path.write_text(text)
    return path


@pytest.fixture
def whole_config(config_file) -> Config:
    return load_config(config_file)


@pytest.fixture
def gym_module(tmp_path, monkeypatch):
    """The first Python block, as the module that its first line names."""
    code = blocks("python")[0]
    file_name = re.fullmatch(r"# (\w+\.py)", code.splitlines()[0])[1]
    (tmp_path / file_name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    module = file_name.removesuffix(".py")
    yield module
    sys.modules.pop(module, None)


@pytest.fixture
def run_gym(gym_module, whole_config, tmp_path):
    """What the README's gym gives for the README's prompt, under the README's configuration."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(blocks("json")[0])
    size = whole_config.grpo.num_generations_per_prompt
    dataset = Dataset.open(
        prompts,
        group_size=size,
        shard_of_agent=whole_config.shard_of_agent,
        seed=0,
        shuffle=False,
        max_prompt_bytes=10_000,
    )
    agent, rows = dataset.agent_of(0, 0), dataset.rows_of(0, 0)
    dataset.close()
    group = make_group(MANIFEST, 7, group_size=size, agent=agent, rows=rows)
    settings = whole_config.env.agents[agent]
    assert settings.gym.split(":")[0] == gym_module

    def run(engine):
        model = PolicyModel(engine, Letters(), Sampling())
        gym = load_gym(settings.gym)((agent,), model, {agent: settings.settings})
        assert gym.agents == (agent,)
        return asyncio.run(rows_of(gym, group))

    return run


async def rows_of(gym, group) -> list[RolloutRow]:
    request = rollout_request(group)
    started = make_started(MANIFEST, group.task_index)
    rows = []
    async for index, result, timing in gym.run(request):
        rows.append(
            rollout_row(
                group,
                started,
                index,
                request.rollout_ids[index],
                result,
                timing=timing,
                produced_at_ms=1,
                options=RowOptions(),
            )
        )
    return rows


def test_the_gym_gives_a_whole_group_of_valid_rows(run_gym, whole_config):
    engine = LongerAndLonger()
    rows = run_gym(engine)
    size = whole_config.grpo.num_generations_per_prompt
    assert sorted(row.row_index for row in rows) == list(range(size))
    assert [row.row_index for row in rows] != list(range(size))  # as they were done
    assert [row.timing is not None for row in rows] == [False] * (size - 1) + [True]
    sampled = dict(engine.answers)
    for row in rows:
        check_row(row)
        (trace,) = row.traces
        (span,) = trace.sampled_spans
        assert span.model_call_id.startswith(row.rollout_id)
        assert tokens(trace.token_ids).tolist() == sampled[span.model_call_id]
        assert row.version_start == LongerAndLonger.version


def test_the_gym_rewards_short_answers(run_gym):
    rows = run_gym(LongerAndLonger())
    by_length = sorted(rows, key=lambda row: len(row.traces[0].token_ids))
    rewards = [row.reward for row in by_length]
    assert rewards == sorted(rewards, reverse=True)
    assert rewards[0] > rewards[-1]


def test_the_gym_passes_a_failed_call_on(run_gym):
    with pytest.raises(GenerationFailed, match="the engine ended"):
        run_gym(LongerAndLonger(fails=2))


@pytest.mark.parametrize("part", CONFIGURATIONS, ids=lambda part: next(iter(part)))
def test_each_configuration_loads(part, whole_config, tmp_path):
    """A part of one is laid over the whole one."""
    merged = part if "run" in part else whole_config.model_dump() | part
    path = tmp_path / "merged.yaml"
    path.write_text(yaml.safe_dump(merged))
    load_config(path)


def test_commands_are_found():
    assert {"make", "groupstream"} <= {command.name for command in COMMANDS}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.line)
def test_each_command_exists(command, config_file):
    if command.name == "make":
        check_make(command)
    elif command.name == "python":
        check_module(command)
    else:
        check_script(command)
        check_configuration(command, config_file)


def check_make(command):
    targets = set(re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE))
    variables = set(re.findall(r"^([A-Z]+)\s*[?:]?=", MAKEFILE, re.MULTILINE))
    named = {argument for argument in command.arguments if "=" not in argument}
    assert named <= targets
    assert set(command.settings) <= variables
    parse_settings(command.settings.get("DEMO", "").split())


def check_module(command):
    module = command.value_of("-m")
    if module is not None:
        assert importlib.util.find_spec(module) is not None


def check_script(command):
    module, _, attribute = SCRIPTS[command.name].partition(":")
    parser = typer.main.get_command(getattr(importlib.import_module(module), attribute))
    words = [argument for argument in command.arguments if argument[0] != "-"]
    while subcommands := getattr(parser, "commands", {}):
        if not words:
            return
        parser = subcommands[words.pop(0)]
    known = {name for each in parser.params for name in (*each.opts, *each.secondary_opts)}
    assert set(command.options) <= known
    options = [each for each in parser.params if each.param_type_name == "option"]
    required = {each.opts[0] for each in options if each.required}
    assert not command.arguments or required <= set(command.options)


def check_configuration(command, config_file):
    """The command's file, ours or the README's, takes its dotted keys and has its shard."""
    file = command.value_of("--config") or "infra/configs/demo.yaml"
    overrides = [f"{key}={value}" for key, value in command.settings.items() if "." in key]
    config = load_config(ROOT / file if file.startswith("infra/") else config_file, overrides)
    if shard := command.value_of("--shard"):
        require_replica(config, shard, int(command.value_of("--replica") or 0))


def test_each_key_is_one_of_the_configuration():
    named = [code.partition("=")[0] for code in inline_code()]
    keys = [name.split(".") for name in named if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", name)]
    ours = [key for key in keys if key[0] in Config.model_fields]
    assert ours
    for key in ours:
        assert is_known(key), ".".join(key)


def is_known(key) -> bool:
    section = Config
    for part in key:
        fields = getattr(section, "model_fields", None)
        if fields is None:
            return True  # below a mapping whose keys are the user's
        if part not in fields:
            return False
        section = fields[part].annotation
    return True


@pytest.mark.parametrize("target", sorted(set(links())))
def test_each_link_leads_somewhere(target):
    assert (ROOT / target).exists()
