"""transformers reminds of a model's length by the tokens that were seen; what matters is where positions reach."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGER, _BEGINS = "transformers.generation.stopping_criteria", "This is a friendly reminder"


def _other(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_BEGINS)


@contextmanager
def without_reminder() -> Iterator[None]:
    """transformers' reminder is not shown; everything else that it logs is."""
    logger = logging.getLogger(_LOGGER)
    logger.addFilter(_other)
    try:
        yield
    finally:
        logger.removeFilter(_other)
