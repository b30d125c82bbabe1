"""Before a start: what an engine remembers about P2P must not outlive the verdict."""

from agent.core.p2p_cache import cache_files, contradicts
from agent.core.revision import Revision
from agent.ports import TargetPort


async def drop_stale(target: TargetPort, revision: Revision) -> str:
    """Remove the files that contradict this revision's P2P, each read back; returns what was done, "" for nothing.

    A file that stays is said and costs no start: with P2P off the flag keeps SGLang from asking it, and with P2P on a
    file that contradicts can only turn custom all-reduce off.
    """
    said = []
    for path in cache_files(revision):
        try:
            text = await target.read_file(path)
            if text is None or not contradicts(text, p2p=revision.p2p):
                continue
            await target.remove_file(path)
            gone = not await target.exists(path)
        except OSError as error:
            said.append(f"{path} cannot be checked or removed ({error or type(error).__name__}): look at it")
            continue
        said.append(
            f"{path} contradicted the P2P verdict, and " + ("is removed" if gone else "is still there")
        )
    return "; ".join(said)
