"""Runs a command, and kills its whole process group once the process that started us is gone.

Started by path with a pipe as standard input that only its starter holds: however that one dies,
the pipe ends. Imports nothing of ours.
"""

import os
import signal
import subprocess
import sys
import threading


def _watch() -> None:
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    # A handler, not SIG_IGN, which the server would inherit: it is the server that answers SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: None)
    threading.Thread(target=_watch, daemon=True).start()
    code = subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL)
    # os._exit: an ordinary exit would wait for the thread that holds standard input.
    os._exit(code if code >= 0 else 128 - code)
