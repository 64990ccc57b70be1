"""A `tokenfleet` whose gateway does not know what workers have cached; the engines cache all the same."""

import sys

from dataplane.live.ledger.mirrors import Mirrors
from tokenfleet.cli.main import main

Mirrors.attach = lambda self, caches, *_: caches  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(main())
