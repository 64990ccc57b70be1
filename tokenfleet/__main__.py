"""`python -m tokenfleet`: the same command line as the installed `tokenfleet`."""

import sys

from tokenfleet.cli.main import main

sys.exit(main())
