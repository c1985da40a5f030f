"""`python -m oomscope`."""

import sys

from oomscope.cli.main import main

sys.exit(main())
