"""Goal: an auditor needs neither torch nor Ray nor numba to verify a ledger.

Method: a fresh interpreter in which importing any of them fails verifies a real ledger through the
command and imports every module of the package.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.verify.honest_run import Run

PROGRAM = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        heavy = name.split(".")[0] in {"torch", "ray", "numba"}
        if heavy or name.startswith("shiftbook.scheduler"):
            raise ImportError(f"{name} is not to be imported here")
        return None

sys.meta_path.insert(0, Refuse())
import shiftbook.verify
names = [m.name for m in pkgutil.walk_packages(shiftbook.verify.__path__, "shiftbook.verify.")]
for name in names:
    importlib.import_module(name)
from shiftbook.verify.commands import verify
code = verify.main([sys.argv[1]], standalone_mode=False)
assert code == 0, code
bad = {n for n in sys.modules if n.split(".")[0] in {"torch", "ray", "numba"}}
assert not bad, bad
print(len(names), "modules")
"""


def test_verify_works_without_torch_ray_and_numba(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    run.write(path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("modules")
