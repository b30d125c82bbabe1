"""Structured logs to stderr: JSON lines for machines, words for a terminal; ``host=sim`` on every simulated line."""

import sys
from collections.abc import Callable

import structlog


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
