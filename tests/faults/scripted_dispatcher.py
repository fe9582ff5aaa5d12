"""`worker_dispatcher.py` with generation workers that take no time; takes the same options."""

from __future__ import annotations

import sys
from typing import Any

from async_grpo.cli.worker import main
from async_grpo.rollout import generation_worker as worker


class ScriptedWorker(worker.GenerationWorker):
    """The real one, but for its engine."""

    def __init__(self, *args: Any, **options: Any) -> None:
        from faults import scripted_engine

        sys.modules["async_grpo.rollout.engine"] = scripted_engine
        super().__init__(*args, **options)


if __name__ == "__main__":
    from faults.scripted_dispatcher import ScriptedWorker as Importable  # not of __main__

    worker.GenerationWorker = Importable  # type: ignore[misc]
    main()
