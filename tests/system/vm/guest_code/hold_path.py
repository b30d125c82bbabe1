"""Keep a file open: hold_path.py PATH..."""

import os
import signal
import sys

for path in sys.argv[1:]:
    os.open(path, os.O_RDWR)
os.write(1, b"ready\n")
signal.pause()
