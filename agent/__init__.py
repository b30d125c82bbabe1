"""A declarative reconciliation agent for GPU hosts."""

__version__ = "0.1.0"
