"""The command ``shadow`` as a program of its own, for tests that kill it."""

from __future__ import annotations

import sys

from shiftbook.verify.shadow_commands import shadow

if __name__ == "__main__":
    sys.exit(shadow.main(sys.argv[1:], standalone_mode=False))
