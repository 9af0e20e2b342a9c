"""Lets `python -m dspine_convert` run the command line."""

import sys

from dspine_convert.cli import main

sys.exit(main())
