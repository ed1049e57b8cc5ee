"""The commands of `shiftbook checkpoint`: bundles, and the files of weight transfers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click

from shiftbook.checkpoint.errors import BundleError
from shiftbook.checkpoint.manifest import BundleManifest, check_files, load_manifest, plain
from shiftbook.checkpoint.shelf import find_bundle, latest_bundle, list_bundles, shelves_in
from shiftbook.checkpoint.transfer.commands import transfer
from shiftbook.ledger.cli_options import (
    Format,
    LedgerURL,
    emit,
    emit_document,
    format_option,
    ledger_option,
    open_book,
    working,
)
from shiftbook.ledger.cli_types import NamedPath, Whole

LIST_COLUMNS = ("name", "iteration", "policy_version", "bytes", "job", "attempt", "bundle_id")
DIFF_COLUMNS = ("part", "tensor", "what", "a", "b", "differing", "elements")
VERIFY_COLUMNS = ("path", "ok", "part", "problem", "bundle_id", "checked", "not_checked")


@click.group()
def checkpoint() -> None:
    """Bundles: list, show, verify, register, retain and compare saved training states."""


checkpoint.add_command(transfer)


@checkpoint.command("list")
@click.argument("folder", type=NamedPath(exists=True, file_okay=False, path_type=Path))
@format_option()
def list_command(folder: Path, format_: Format) -> None:
    """List the complete bundles in FOLDER, oldest first."""
    saved = list_bundles(folder)
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
        for bundle in saved
    )
    emit(rows, LIST_COLUMNS, format_)
    if not saved:
        _tell_shelves(folder)


def _tell_shelves(folder: Path) -> None:
    """Say on stderr which folders in this one hold bundles, where it holds none itself."""
    if inside := shelves_in(folder):
        names = ", ".join(inside)
        click.echo(f"no bundle in {folder} itself; folders in it hold some: {names}", err=True)


@checkpoint.command()
@click.argument("path", type=NamedPath(exists=True, path_type=Path))
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
@click.argument("path", type=NamedPath(exists=True, file_okay=False, path_type=Path))
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


@checkpoint.command()
@click.argument("source", type=NamedPath(exists=True, path_type=Path))
@click.argument("folder", type=NamedPath(file_okay=False, path_type=Path))
@click.option("--job", required=True, help="Job that the state belongs to.")
@click.option("--attempt", default="registered", show_default=True, help="Attempt that made it.")
@click.option("--iteration", type=Whole(min=0), default=0, show_default=True)
@click.option("--policy-version", type=Whole(min=0), default=0, show_default=True)
@click.option("--part", default="policy", show_default=True, help="Name of the bundle's one part.")
@click.option("--kind", default=None, help="What the part is, where its name does not say.")
@click.option(
    "--ledger",
    "ledger_url",
    type=LedgerURL(),
    envvar="SHIFTBOOK_LEDGER",
    default=None,
    show_envvar=True,
    help="Ledger that records the registration as an event of the job; none by default.",
)
@click.option("--new-ledger", is_flag=True, help="Make the ledger where there is none yet.")
def register(
    source: Path,
    folder: Path,
    job: str,
    attempt: str,
    iteration: int,
    policy_version: int,
    part: str,
    kind: str | None,
    ledger_url: str | None,
    new_ledger: bool,
) -> None:
    """Register the state at SOURCE as a bundle in FOLDER, without writing its tensors again.

    SOURCE is a folder of torch.distributed.checkpoint, a .safetensors file, or a folder of such
    files as Hugging Face has them. The bundle names the files by absolute path and holds their
    SHA-256 and the tensors' fingerprints, so they must stay where they are. Opening the index of a
    torch.distributed.checkpoint folder runs what its pickle says: register only what you trust.

    With --ledger the job knows the bundle, opened or not yet, and an attempt that begins from it
    has an origin for the verifier.
    """
    from shiftbook.checkpoint.manifest import BundleFields
    from shiftbook.checkpoint.register import register_in_ledger, register_state
    from shiftbook.ledger.gate import Gate

    fields = BundleFields(
        job=job, attempt=attempt, iteration=iteration, policy_version=policy_version
    )
    if new_ledger and ledger_url is None:
        raise click.UsageError("expected --ledger beside --new-ledger, found none; name the ledger")
    with working("reading and hashing the state"):
        if ledger_url is None:
            bundle = register_state(source, folder, fields, part=part, kind=kind)
        else:
            with open_book(ledger_url, write=True, create=new_ledger) as ledger:
                gate = Gate(ledger, by="checkpoint-register")
                bundle = register_in_ledger(gate, source, folder, fields, part=part, kind=kind)
    record = bundle.manifest.parts[part]
    click.echo(f"{bundle.path}: {len(record.tensors)} tensors, {record.bytes} bytes, {record.root}")


@checkpoint.command("retain")
@click.argument("folder", type=NamedPath(exists=True, file_okay=False, path_type=Path))
@click.option("--keep", type=Whole(min=1), required=True, help="Newest bundles to keep.")
@click.option(
    "--golden",
    multiple=True,
    type=NamedPath(exists=True, dir_okay=False, path_type=Path),
    help="A golden trace; bundles that it names stay. Once for each.",
)
@click.option("--no-golden", is_flag=True, help="No golden trace needs any of these bundles.")
@ledger_option
def retain_command(
    folder: Path, keep: int, golden: tuple[Path, ...], no_golden: bool, ledger_url: str
) -> None:
    """Delete all bundles in FOLDER but the newest and those that are needed.

    Needed is what an attempt began from or restored, in its own job or in a fork, the bundle that
    an open job would go on from, what a golden trace names, and all of jobs that the ledger does
    not know. No ledger knows of golden traces, so name each with --golden, or say with --no-golden
    that there is none. The newest bundles are read first: one that is damaged stays, is named on
    stderr, and does not count. Prints what was deleted.
    """
    from shiftbook.checkpoint.retention import retain_needed

    def tell(error: BundleError) -> None:
        click.echo(f"kept, not counted: {error}", err=True)

    if bool(golden) == no_golden:
        raise click.UsageError(
            "expected either --golden FILE for each golden trace or --no-golden, found "
            f"{'both' if no_golden else 'neither'}; a bundle that a trace needs is gone for good"
        )
    with open_book(ledger_url) as ledger:
        for path in retain_needed(folder, keep, ledger, golden=golden, on_damaged=tell):
            click.echo(str(path))
    if latest_bundle(folder) is None:
        _tell_shelves(folder)


@checkpoint.command("diff")
@click.argument("a", type=NamedPath(exists=True, path_type=Path))
@click.argument("b", type=NamedPath(exists=True, path_type=Path))
@click.option(
    "--part", default="policy", show_default=True, help="Name of the one part of a foreign state."
)
@click.option(
    "--ignore",
    "ignored",
    multiple=True,
    metavar="FIELD",
    help="A field of the bundles that may differ, such as job or attempt; once for each.",
)
@format_option()
@click.pass_context
def diff_command(
    context: click.Context, a: Path, b: Path, part: str, ignored: tuple[str, ...], format_: Format
) -> None:
    """Say how the states at A and B differ: fields, tensors, elements; exit 1 when they do.

    Each is a bundle, a folder of bundles (its latest one), or what `register` takes. Fields
    (generators, sampler, schedule, controllers, digests, lineage) are compared between bundles.
    """
    from shiftbook.checkpoint.difference import compare_states
    from shiftbook.checkpoint.stored_state import open_stored_state

    with working("comparing the states"):
        one, other = (
            open_stored_state(find_bundle(p) if latest_bundle(p) else p, part=part) for p in (a, b)
        )
        found = list(compare_states(one, other, ignored=ignored))
    emit(
        ((d.part, d.name, d.what, d.a, d.b, d.differing, d.elements) for d in found),
        DIFF_COLUMNS,
        format_,
    )
    if found:
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
            f"{len(manifest.in_flight_uids or ())} uids in flight"
        )
    for name, part in manifest.parts.items():
        shared = ", shared file" if part.external else ""
        lines.append(
            f"part {name}: {part.kind}, {len(part.tensors)} tensors, {part.bytes} bytes, "
            f"fingerprint {part.root}{shared}"
        )
    return "\n".join(lines)
