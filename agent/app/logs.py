"""Structured logs to stderr: JSON lines for machines, words for a terminal; ``host=sim`` on every simulated line."""

import sys
from collections.abc import Callable

import structlog

from agent.core.redact import redact_all


def _without_credentials(
    _logger: object, _method: str, event: structlog.types.EventDict
) -> structlog.types.EventDict:
    """Law 10: an error's text may quote anything."""
    return {key: redact_all(value) for key, value in event.items()}


def start_logging(simulated: str) -> Callable[..., None]:
    """A logger for constant event names with keys. Every line carries whether it happened on a real host."""
    terminal = sys.stderr.isatty()
    renderer: structlog.types.Processor = (
        structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            _without_credentials,
            renderer,
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logger = structlog.get_logger().bind(host="sim" if simulated else "real")

    def log(event: str, **fields: object) -> None:
        level = logger.error if "exc_info" in fields else logger.info
        level(event, **fields)

    return log
