"""``agent status``: the published file, rendered. Works with the daemon dead, and imports next to nothing."""

import sys
import time

from agent.app.paths import Paths
from agent.app.status_view import exit_code, is_alive, read_status, render_json, render_status, render_yaml
from agent.app.terminal import encodable, use_color, width


def status(paths: Paths, output: str) -> int:
    try:
        document = read_status(paths.status)
    except (OSError, ValueError) as error:
        print(f"agent: {error}", file=sys.stderr)
        return 4
    now = time.time()
    alive = is_alive(paths.lock, document.get("pid", 0))
    if output == "json":
        text = render_json(document)
    elif output == "yaml":
        text = render_yaml(document)
    else:
        color = use_color(sys.stdout)
        text = render_status(
            document, wide=output == "wide", color=color, now=now, alive=alive, width=width()
        )
    print(encodable(text, sys.stdout))
    # A truth that nobody watches over is a stale one, however young it is.
    return exit_code(document, now, alive=alive)
