"""The environment variables that vLLM reads while it is imported, set in this one place."""

import os
import sys

from schemas.errors import ConfigError


def prepare_environment(kv_cache_gib: int) -> None:
    """Call before the first import of vllm; raises ConfigError after it.

    A variable that the user has set keeps its value, except the one that the engine relies on.
    """
    if "vllm" in sys.modules and os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
        raise ConfigError(
            "vllm was imported before prepare_environment(), so it will start its engine in "
            "another process; import vllm only after it"
        )
    # The engine runs in our process: nothing is left behind by a kill, and weights change exactly
    # between two steps.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    defaults = {
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # every shard would bind to the same first cores
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # models are directories
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
