"""`python -m ddp_doctor` is the command `ddp-doctor`."""

import sys

from ddp_doctor.command import main

sys.exit(main())
