"""The process of a rank, ``__main__.py FD [main]``, which rank 0 starts.

It imports nothing of the caller's, so that a script needs no ``if __name__ == "__main__":``.
"""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1
"""``prctl``: the signal at the end of the thread that has started this process, also if this one
is stopped. So it is asked for where that is the main thread, and before torch is imported."""

if __name__ == "__main__":
    if sys.argv[2:] == ["main"]:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    from mrv1.runner.ranks.child import main

    main(int(sys.argv[1]))
