"""What several tests of the assembler begin with."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.assembling import Run, create


@pytest.fixture
def new_run(broker: Any, run_id: str, tmp_path: Path) -> Callable[..., Run]:
    """A run of the test's own; changes of its `kafka` section may be given."""
    return partial(create, broker.bootstrap_servers, run_id, tmp_path)
