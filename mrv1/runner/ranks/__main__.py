"""The process of a rank: ``python -m mrv1.runner.ranks FD``, which rank 0 starts.

It imports nothing of the caller's, so that a script needs no ``if __name__ == "__main__":``.
"""

import sys

from mrv1.runner.ranks.child import main

if __name__ == "__main__":
    main(int(sys.argv[1]))
