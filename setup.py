"""Map the folders at the root into the namespace ``shiftbook``, every subpackage included."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
ROOMS = ("ledger", "checkpoint", "scheduler", "verify", "jobs")

# A subpackage that is missing from this list works in an editable install and is absent from
# the wheel, so the list is computed; tests/test_packaging.py compares it with the wheel.
PACKAGES = [
    f"shiftbook.{name}"
    for room in ROOMS
    for name in [room, *(f"{room}.{sub}" for sub in find_packages(str(ROOT / room)))]
]

setup(
    packages=PACKAGES,
    package_dir={f"shiftbook.{room}": room for room in ROOMS},
    package_data={
        name: ["py.typed", "*.sql", "*.safetensors", "*.html", "*.json"] for name in PACKAGES
    }
    | {"shiftbook.jobs": ["py.typed", "assets/*.safetensors", "assets/*.json"]},
)
