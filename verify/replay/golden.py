"""Golden traces: small text files, made for review, that say what a job's first steps must show.

The form: a header of ``name: value`` lines, an empty line, a line for each observation (step,
component, kind, name, then ``field=value``), and ``sha256:`` over everything before it. What is
not written by ``--update-golden`` is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from shiftbook.ledger.durable import replace_file, sync_path
from shiftbook.verify.errors import GoldenInvalid
from shiftbook.verify.replay.compare import Tolerance
from shiftbook.verify.replay.protocol import Conditions
from shiftbook.verify.replay.trace import KINDS, Line, Trace

TITLE = "# Shiftbook golden trace, form 1. Written by --update-golden; do not edit."
FAMILY = "# Shiftbook golden trace, form "
HEADER = ("target", "config", "config-sha256", "conditions", "equality", "stack")
END = "sha256: "
LARGEST_BYTES = 16 << 20
AGAIN = "write it again with --update-golden and review the difference"


def write_golden(path: Path, trace: Trace, tolerance: Tolerance | None = None) -> None:
    """Write a trace's golden lines to ``path``, whole and synced or not at all.

    Raises GoldenInvalid where another kind of file stands there.
    """
    if path.exists() and not _begins_right(path):
        raise GoldenInvalid(
            f"{path}: expected a golden trace or no file there, found something else; choose "
            "another name"
        )
    text = "\n".join(_content(trace, tolerance)) + "\n"
    whole = text + END + hashlib.sha256(text.encode()).hexdigest() + "\n"
    try:
        replace_file(path, whole.encode(), alone=False)
        sync_path(path.parent)
    except OSError as error:
        raise GoldenInvalid(
            f"{path}: expected a file that can be written, found {error.strerror}; make its "
            "folder, or choose another"
        ) from error


def _begins_right(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return stream.read(len(FAMILY)) == FAMILY.encode()
    except OSError:
        return False


def _content(trace: Trace, tolerance: Tolerance | None) -> Iterator[str]:
    run = trace.conditions
    yield TITLE
    yield f"target: {trace.target}"
    yield f"config: {json.dumps(trace.config, sort_keys=True, ensure_ascii=False)}"
    yield f"config-sha256: {trace.config_digest}"
    yield f"conditions: seed={run.seed} steps={run.steps}"
    yield f"equality: {trace.equality}"
    yield f"stack: {trace.stack}"
    for name, value in (tolerance or Tolerance()).plain().items():
        yield f"tolerance: {name} {value!r}"
    yield ""
    for line in trace.lines:
        if not line.detail:
            fields = " ".join(f"{name}={value}" for name, value in line.fields.items())
            yield f"{line.step} {line.component} {line.kind} {line.name} {fields}"


def read_golden(path: Path, target: str | None = None) -> tuple[Trace, Tolerance]:
    """The trace of a golden file and the tolerance that was measured with it.

    Raises GoldenInvalid for a file that is missing, edited, torn or of a newer form, and where
    ``target`` is given and not the one it was made of.
    """
    text = _text(path)
    body, end, digest = text.rpartition(END)
    if not end or (body and not body.endswith("\n")):
        raise GoldenInvalid(f"{path}: expected a last line with its sha256, found none; the file "
                            f"is torn or edited: restore it, or {AGAIN}")  # fmt: skip
    if hashlib.sha256(body.encode()).hexdigest() != digest.strip():
        raise GoldenInvalid(
            f"{path}: expected the sha256 of what stands above its last line, found another; the "
            f"file was edited by hand or torn: restore it, or {AGAIN}"
        )
    head, _, rest = body.partition("\n\n")
    try:
        trace, tolerance = _parse(head.splitlines()[1:], rest.splitlines(), str(path))
    except (ValueError, KeyError, TypeError) as error:
        raise GoldenInvalid(
            f"{path}: expected the form of a golden trace, found something else ({error}); {AGAIN}"
        ) from error
    if target is not None and trace.target != target:
        raise GoldenInvalid(
            f"{path}: expected a golden trace of {target}, found one of {trace.target}; give the "
            "right file, or the right target"
        )
    return trace, tolerance


def _text(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > LARGEST_BYTES:
            raise GoldenInvalid(
                f"{path}: expected a golden trace of at most {LARGEST_BYTES} bytes, found {size}; "
                "it is another file"
            )
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise GoldenInvalid(
            f"{path}: expected a golden trace, found no file; make it with --update-golden"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise GoldenInvalid(
            f"{path}: expected a text file that can be read, found {error}; give the golden trace"
        ) from error
    if not text.startswith(FAMILY):
        raise GoldenInvalid(
            f"{path}: expected a golden trace, found another kind of file; make one with "
            "--update-golden"
        )
    if not text.startswith(TITLE):
        form = text.partition("\n")[0].removeprefix(FAMILY)[:20]
        raise GoldenInvalid(
            f"{path}: expected form 1 of golden traces, found form {form!r}; use the version of "
            f"shiftbook that wrote it, or {AGAIN}"
        )
    return text


def _parse(head: list[str], rest: list[str], source: str) -> tuple[Trace, Tolerance]:
    values: dict[str, str] = {}
    relative: dict[str, float] = {}
    for text in head:
        name, colon, value = text.partition(": ")
        if not colon:
            raise ValueError(f"header line {text[:60]!r}")
        if name == "tolerance":
            of, _, number = value.rpartition(" ")
            relative[of] = float(number)
        else:
            values[name] = value
    config = json.loads(values["config"])
    conditions = dict(part.split("=", 1) for part in values["conditions"].split())
    if values["equality"] not in ("bits", "tolerance"):
        raise ValueError(f"equality {values['equality']!r}")
    trace = Trace(
        target=values["target"],
        config=config,
        equality=cast("Any", values["equality"]),
        conditions=Conditions(int(conditions["seed"]), int(conditions["steps"]), "golden"),
        stack=values["stack"],
        lines=tuple(_line(text) for text in rest if text),
        whole=False,
        source=source,
    )
    if trace.config_digest != values["config-sha256"]:
        raise ValueError("a configuration with another sha256")
    return trace, Tolerance.from_plain(relative)


def _line(text: str) -> Line:
    step, component, kind, name, *fields = text.split(" ")
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r}")
    parts = (part.partition("=") for part in fields)
    return Line(int(step), component, kind, name, {part: value for part, _, value in parts})
