"""The agent's own commands, run as an operator would."""

import asyncio

LIMIT = 1800.0  # seconds: the full test of many GPUs


async def run(*command: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(LIMIT):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, out.decode(), err.decode()
