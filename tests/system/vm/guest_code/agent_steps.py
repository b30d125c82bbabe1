"""Commands of the agent in one process, whose start is most of what each costs: agent_steps.py STEPS.

STEPS is JSON: a list of {"files": {path: text}, "argv": [...]}; the files are written before the command. What comes
out is JSON, too: a list of [exit status, standard output].
"""

import contextlib
import io
import json
import pathlib
import sys

from agent.app.main import main

answers = []
for step in json.loads(sys.argv[1]):
    for name, text in step["files"].items():
        path = pathlib.Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main(step["argv"])
    answers.append([status, out.getvalue()])
print(json.dumps(answers))
