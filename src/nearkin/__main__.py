"""`python -m nearkin`."""

import sys

from nearkin.cli import main

sys.exit(main())
