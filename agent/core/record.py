"""The base of everything that crosses a file or process boundary."""

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Frozen, and closed: a key that this version does not know is an error, not a surprise."""

    model_config = ConfigDict(frozen=True, extra="forbid")
