"""The commands `shiftbook checkpoint list | show | verify`, over manifest and shelf."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click

from shiftbook.checkpoint.errors import BundleError
from shiftbook.checkpoint.manifest import BundleManifest, check_files, load_manifest, plain
from shiftbook.checkpoint.shelf import find_bundle, list_bundles
from shiftbook.ledger.cli_options import Format, emit, emit_document, format_option

LIST_COLUMNS = ("name", "iteration", "policy_version", "bytes", "job", "attempt", "bundle_id")
VERIFY_COLUMNS = ("path", "ok", "part", "problem", "bundle_id", "checked", "not_checked")


@click.group()
def checkpoint() -> None:
    """Bundles: list, show and verify saved training states."""


@checkpoint.command("list")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@format_option()
def list_command(folder: Path, format_: Format) -> None:
    """List the complete bundles in FOLDER, oldest first."""
    rows = (
        (
            bundle.path.name,
            bundle.manifest.iteration,
            bundle.manifest.policy_version,
            bundle.manifest.bytes,
            bundle.manifest.job,
            bundle.manifest.attempt,
            bundle.bundle_id,
        )
        for bundle in list_bundles(folder)
    )
    emit(rows, LIST_COLUMNS, format_)


@checkpoint.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--format",
    "format_",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="Text for people or the whole manifest as JSON.",
)
def show(path: Path, format_: str) -> None:
    """Show the manifest of the bundle at PATH (of the latest one in a folder of bundles)."""
    manifest = load_manifest(find_bundle(path) if path.is_dir() else path)
    if format_ == "json":
        emit_document(plain(manifest))
    else:
        click.echo(_summary(manifest))


@checkpoint.command()
@click.argument("path", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--files-only", is_flag=True, help="Do not load the tensors (needs no torch).")
@format_option()
@click.pass_context
def verify(context: click.Context, path: Path, files_only: bool, format_: Format) -> None:
    """Check that the bundle at PATH is what was saved; exit 1 when it is not.

    Checks the manifest against its digest and the bytes of every part; with torch installed also
    loads the tensors and compares their fingerprints. Says what was checked.
    """
    bundle = find_bundle(path)
    part = problem = bundle_id = None
    checked: list[str] = []
    try:
        bundle_id = load_manifest(bundle).bundle_id
        checked.append("manifest")
        check_files(bundle)
        checked.append("files")
        if not files_only and importlib.util.find_spec("torch") is not None:
            from shiftbook.checkpoint.restore import restore_bundle

            restore_bundle(bundle)
            checked.append("tensors")
    except BundleError as error:
        part, problem = error.part, str(error)
    left = [step for step in ("manifest", "files", "tensors") if step not in checked]
    row = (str(bundle), problem is None, part, problem, bundle_id, checked, left)
    if format_ == "table":
        said = f"good: {bundle}" if problem is None else f"bad: {problem}"
        not_checked = f"; not checked: {', '.join(left)}" if left else ""
        click.echo(f"{said}; passed: {', '.join(checked) or 'nothing'}{not_checked}")
    else:
        emit([row], VERIFY_COLUMNS, format_)
    if problem is not None:
        context.exit(1)


def _summary(manifest: BundleManifest) -> str:
    lines = [
        f"bundle {manifest.bundle_id}",
        f"job {manifest.job}, attempt {manifest.attempt}, parent {manifest.parent or 'none'}",
        f"iteration {manifest.iteration}, policy version {manifest.policy_version}, "
        f"snapshot {manifest.snapshot}",
    ]
    if manifest.sampler is not None:
        lines.append(
            f"sampler at epoch {manifest.sampler.epoch}, {manifest.sampler.position} samples in; "
            f"{len(manifest.in_flight_uids)} uids in flight"
        )
    for name, part in manifest.parts.items():
        shared = ", shared file" if part.external else ""
        lines.append(
            f"part {name}: {part.kind}, {len(part.tensors)} tensors, {part.bytes} bytes, "
            f"fingerprint {part.root}{shared}"
        )
    return "\n".join(lines)
