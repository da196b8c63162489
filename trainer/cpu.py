"""Where the trainer runs: on its GPU, or on the CPU, where megatron-core is led to believe in one.

Nothing else in `trainer` asks which. On a machine with CUDA `install()` does nothing. Without it,
megatron-core still names "cuda" devices, streams and generators: all of them become the CPU's.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
# megatron-core groups parameters and buffers by these type strings
_CUDA_TYPE_NAMES = {
    f"torch.{kind}Tensor": f"torch.cuda.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")
}
_undo: list[Callable[[], None]] = []  # newest last; empty where the shim is not installed


def device() -> torch.device:
    """This rank's device: the GPU that LOCAL_RANK names, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return _CPU


def backend() -> str:
    """The torch.distributed backend that serves `device()`."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def install() -> None:
    """Call before the first megatron-core call in the thread that trains; again does nothing."""
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
        return
    if _undo:
        return
    _replace_cuda_functions()
    mode = ExitStack()
    mode.enter_context(_CudaMeansCpu())
    _undo.append(mode.close)


def uninstall() -> None:
    """Gives torch its own functions back, for a process that also does other things."""
    while _undo:
        _undo.pop()()


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites the device of every torch call made in this thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs and _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.to and any(_is_cuda(argument) for argument in args[1:]):
            args = tuple(_CPU if _is_cuda(argument) else argument for argument in args)
        answer = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and isinstance(answer, str):
            return _CUDA_TYPE_NAMES.get(answer, answer)
        return answer


def _is_cuda(candidate: object) -> bool:
    if isinstance(candidate, torch.device):
        return candidate.type == "cuda"
    return isinstance(candidate, str) and candidate.startswith("cuda")


class _NoStream:
    """The CPU works in program order: there is nothing to wait for."""

    def __init__(self, *_: object, **__: object) -> None: ...
    def wait_stream(self, other: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def synchronize(self) -> None: ...
    def __enter__(self) -> "_NoStream":
        return self

    def __exit__(self, *_: object) -> None: ...


def _replace_cuda_functions() -> None:
    import megatron.core.tensor_parallel.random as megatron_random  # noqa: PLC0415 slow import

    def nothing(*_: object, **__: object) -> None: ...
    def no_stream(*_: object, **__: object) -> _NoStream:
        return _NoStream()

    def get_state(*_: object, **__: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_: object, **__: object) -> None:
        torch.set_rng_state(state)

    seed = torch.default_generator.manual_seed
    _replace(torch.cuda, current_device=lambda: _CPU, Stream=_NoStream)
    _replace(torch.cuda, synchronize=nothing, empty_cache=nothing)
    _replace(torch.cuda, current_stream=no_stream, default_stream=no_stream, stream=no_stream)
    _replace(torch.cuda, get_rng_state=get_state, set_rng_state=set_state)
    _replace(torch.cuda.random, get_rng_state=get_state, set_rng_state=set_state)
    _replace(torch.cuda, manual_seed=seed, manual_seed_all=seed)
    _replace(megatron_random, _set_cuda_rng_state=set_state)


def _replace(module: Any, **functions: Any) -> None:
    for name, function in functions.items():
        _undo.append(partial(setattr, module, name, getattr(module, name)))
        setattr(module, name, function)
