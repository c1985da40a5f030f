"""What torchrun itself knows, heard in its own process.

Which worker started with which pid, and how each ended.

torchrun reports structured events to a logger named after `--event-log-handler` (default "null"): a handler
on that logger is all it takes, and no private interface.
"""

from __future__ import annotations

import json
import logging
import os
import time

from ..protocol import layout
from ..protocol.records import encode
from .guard import guarded

#: Source: torch.distributed.elastic.events._get_or_create_logger.
_LOGGER = "torchelastic-events-null"


class _ToFile(logging.Handler):
    """Appends each event as one line of elastic.jsonl."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    @guarded("elastic")
    def emit(self, record: logging.LogRecord) -> None:
        event = json.loads(record.getMessage())
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, 0o600)
        try:
            os.write(descriptor, encode({"t": time.time_ns(), "k": "elastic", "n": 0, "event": event}))
        finally:
            os.close(descriptor)


@guarded("elastic")
def listen(attempt_dir: str) -> None:
    """Write torchrun's events of this process to the attempt's folder."""
    logging.getLogger(_LOGGER).addHandler(_ToFile(os.path.join(attempt_dir, layout.ELASTIC_FILE)))
