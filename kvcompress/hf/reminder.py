"""transformers reminds of a model's length by the tokens that were seen; what matters is where positions reach."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


def warn_of_length(cache: Any, stacklevel: int) -> bool:
    """Whether positions of a cache of ours reach beyond the trained length, of which it warns. stacklevel: as of
    warnings.warn in the caller."""
    reach = cache.reach()
    if reach <= cache.trained_length:
        return False
    warnings.warn(
        f"positions reach {reach:,} with {type(cache).__name__}, and the model was trained to "
        f"{cache.trained_length:,}: what it writes from there on is not to be relied on; StreamingCache stays within, "
        "and IterativeCache with every=64, say",
        stacklevel=stacklevel + 1,
    )
    return True
