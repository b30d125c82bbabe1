"""The pure core: data and decisions. No I/O, no clock, no asyncio, no logging."""
