"""`python -m kvanta` is the command kvanta."""

import sys

from kvanta.cli import main

sys.exit(main())
