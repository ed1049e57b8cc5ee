"""The command line: what it prints, its exit codes, and one line for whatever goes wrong.

Method: commands run in this process on ledgers that hold known events; edge cases run as real
processes, since pipes, signals, environment and start-up exist only there. Every failure must give
exit code 2, exactly one line on stderr that says what to do, and no traceback.
"""

from __future__ import annotations

import csv
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from shiftbook.ledger import cli, cli_options, health
from shiftbook.ledger.cli import main
from shiftbook.ledger.errors import InvalidInput, ShiftbookError
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.topology import Topology
from tests.ledger.sample_ledger import (
    ROLL,
    SPLIT,
    Clock,
    Writer,
    open_sample,
    write_every_status,
    write_sample,
)

ALL_ROLLOUT = ("--after", "rollout=n/0,n/1 inference= trainer=", "--owed", "inference=0 trainer=0")
DEADLINE_S = 60.0
SHIFTBOOK = [sys.executable, "-c", "from shiftbook.ledger.cli import main; main()"]


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger with three jobs, for commands that only read."""
    path = tmp_path_factory.mktemp("book") / "ledger.db"
    write_sample(path, iterations=3).close()
    return path


@pytest.fixture
def live(store_url: str) -> str:
    """A ledger with one open job that may be moved, on each store."""
    clock = Clock()
    with open_sample(store_url, clock) as ledger:
        writer = Writer(ledger, clock, "job", "dynamic", random.Random(1))
        writer.open()
        writer.update(0)
    return store_url


def invoke(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, list(arguments), input=stdin)


def rows_of(*arguments: str) -> list[dict[str, Any]]:
    """Run a command that must succeed, as JSON."""
    result = invoke(*arguments, "--format", "json")
    assert result.exit_code == 0, result.stderr
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def run(
    *arguments: str,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    under: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run the command as a process, ``under`` another program where one is given."""
    return subprocess.run(
        [*under, *SHIFTBOOK, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
        env={**os.environ, "SHIFTBOOK_DEBUG": "", **(env or {})},
    )


def assert_one_line(code: int, stderr: str, *said: str) -> None:
    """Exit code 2 and one line that holds every given text."""
    assert code == 2, stderr
    assert "Traceback" not in stderr
    assert len(stderr.strip().splitlines()) == 1, stderr
    assert stderr.startswith("shiftbook: ")
    for text in said:
        assert text in stderr


# -- looking at the book -------------------------------------------------------------------


def test_jobs(book: Path) -> None:
    rows = rows_of("jobs", "--ledger", str(book))
    assert [row["job"] for row in rows] == ["demo-dynamic", "demo-static", "demo-timeshared"]
    assert rows[0]["status"] == "closed"
    assert rows[0]["iteration"] == rows[0]["policy_version"] == 3
    assert rows[0]["committed"] == 9
    assert rows[0]["rejected"] == 1
    assert rows[1]["committed"] == 0


def test_log_filters_combine(book: Path) -> None:
    ledger = ["--ledger", str(book)]
    every = rows_of("log", *ledger)
    assert [row["position"] for row in every] == list(range(len(every)))
    one = rows_of("log", *ledger, "--job", "demo-static", "--type", "IterationCompleted")
    assert [row["body"]["iteration"] for row in one] == [0, 1, 2]
    both = rows_of("log", *ledger, "--type", "LeaseGranted", "--type", "LeaseReleased")
    assert {row["type"] for row in both} == {"LeaseGranted", "LeaseReleased"}
    after = rows_of("log", *ledger, "--after", "10", "--limit", "3")
    assert [row["position"] for row in after] == [11, 12, 13]
    newest = rows_of("log", *ledger, "--newest", "--limit", "2")
    assert [row["position"] for row in newest] == [len(every) - 1, len(every) - 2]
    move = rows_of("log", *ledger, "--operation", "move-demo-dynamic-1")
    assert [row["type"] for row in move][:2] == ["ReallocationProposed", "ReallocationGranted"]


def test_log_by_time(book: Path) -> None:
    every = rows_of("log", "--ledger", str(book))
    middle = every[len(every) // 2]
    at = cli_options.clock_text(middle["recorded_ns"]).replace(" ", "T")
    since = rows_of("log", "--ledger", str(book), "--since", at)
    until = rows_of("log", "--ledger", str(book), "--until", at)
    assert len(since) + len(until) == len(every)
    assert since[0]["recorded_ns"] >= until[-1]["recorded_ns"]
    assert rows_of("log", "--ledger", str(book), "--since", "1s") == []


def test_log_by_component(book: Path) -> None:
    tool = rows_of("log", "--ledger", str(book), "--component", "tool", "--job", "demo-dynamic")
    assert {row["type"] for row in tool} <= {"JobOpened", "WindowObserved"}
    trainer = rows_of("log", "--ledger", str(book), "--component", "trainer")
    kinds = {row["type"] for row in trainer}
    assert {"ReplicaStarted", "ReallocationProposed", "IterationCompleted"} <= kinds
    assert "WeightSyncDelivered" not in kinds
    rollout = rows_of("log", "--ledger", str(book), "--component", "rollout")
    assert "WeightSyncDelivered" in {row["type"] for row in rollout}


def test_log_as_json_lines_is_what_was_hashed(book: Path) -> None:
    result = invoke("log", "--ledger", str(book), "--format", "jsonl")
    with Ledger.open(f"sqlite:///{book}", read_only=True) as ledger:
        stored = [event.data.decode() for event in ledger.read()]
    assert result.stdout.splitlines() == stored


def test_log_as_csv_and_as_a_piped_table(book: Path) -> None:
    result = invoke("log", "--ledger", str(book), "--limit", "4", "--format", "csv")
    parsed = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [row["position"] for row in parsed] == ["0", "1", "2", "3"]
    assert json.loads(parsed[1]["body"])["holder"] == "a1"
    table = invoke("log", "--ledger", str(book), "--limit", "4").stdout
    assert table.splitlines()[0].split() == [
        *("position", "recorded", "job", "type", "operation", "summary")
    ]
    assert "─" not in table
    assert max(len(line) for line in table.splitlines()) > 80, "a piped table is not cut"


def test_show_a_position(book: Path) -> None:
    result = invoke("show", "1", "--ledger", str(book), "--format", "json")
    with Ledger.open(f"sqlite:///{book}", read_only=True) as ledger:
        assert json.loads(result.stdout) == ledger.event(1).plain()


def test_show_the_story_of_a_move(book: Path) -> None:
    story: Any = rows_of("show", "move-demo-dynamic-1", "--ledger", str(book))
    assert story["status"] == "committed"
    assert story["moved_bytes"] == 3_200_000
    assert story["requests_handed_over"] == 2
    assert [c["chosen"] for c in story["candidates"]] == [True, False]
    assert story["candidates"][1]["rejected_because"] == "staying is slower"
    assert story["realised_gain_s"] is not None
    assert [step["type"] for step in story["steps"]] == [
        "ReallocationProposed",
        "ReallocationGranted",
        "ReallocationQuiesced",
        "ReallocationTransferred",
        "ReallocationVerified",
        "ReallocationCommitted",
        "GainRealized",
    ]
    text = invoke("show", "move-demo-dynamic-1", "--ledger", str(book)).stdout
    for said in ("candidates", "staying is slower", "stall", "3.05 MiB", "realised"):
        assert said in text


def test_show_stories_of_every_status_and_of_syncs(tmp_path: Path) -> None:
    path = tmp_path / "every.db"
    with write_every_status(path) as ledger:
        operations = [e.operation for e in ledger.read(types={"ReallocationProposed"})]
        writer = Writer(ledger, Clock(), "job-committed", "dynamic", random.Random(1))
        writer.version = 4
        failed = writer.sync(fail=True)
    for operation in operations:
        assert operation is not None
        story: Any = rows_of("show", operation, "--ledger", str(path))
        assert operation == f"move-job-{story['status']}-1"
        text = invoke("show", operation, "--ledger", str(path)).stdout
        assert text.startswith(f"{operation}  {story['status']}")
    text = invoke("show", "move-job-rejected-1", "--ledger", str(path)).stdout
    assert "rule cooldown: moved 1.5 s ago" in text
    sync: Any = rows_of("show", failed, "--ledger", str(path))
    assert (sync["status"], sync["ended_because"]) == ("failed", "no engine")


def test_state(live: str) -> None:
    standing: Any = rows_of("state", "--ledger", live)
    assert standing["job"] == "job"
    assert standing["topology"]["rollout"] == ["n/0"]
    assert [lease["device"] for lease in standing["leases"]] == ["n/0", "n/1"]
    assert {replica["component"] for replica in standing["replicas"]} == {
        *("inference", "rollout", "trainer")
    }
    assert standing["last_bundle"]["iteration"] == 1
    text = invoke("state", "job", "--ledger", live).stdout
    for said in ("pid 5011", "epoch 1", "safe mode    no", "bundle       iteration 1"):
        assert said in text


def test_follow_prints_what_is_appended(live: str) -> None:
    with subprocess.Popen(
        [*SHIFTBOOK, "follow", "--ledger", live, "--after", "-1", "--type", "WindowObserved"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        watchdog = threading.Timer(DEADLINE_S, process.kill)
        watchdog.start()
        with Ledger.open(live) as ledger:
            writer = Writer(ledger, Clock(), "job", "dynamic", random.Random(1))
            positions = [writer.window(0, 0.1, remaining) for remaining in (3, 2, 1)]
        lines = [json.loads(process.stdout.readline()) for _ in positions]
        assert [line["position"] for line in lines] == positions
        process.send_signal(signal.SIGINT)
        assert process.stderr.read().strip() == ""
    watchdog.cancel()
    assert process.returncode == 130


def test_follow_starts_at_the_head_and_ends_at_its_limit(live: str) -> None:
    result: list[Result] = []
    thread = threading.Thread(
        target=lambda: result.append(invoke("follow", "--ledger", live, "--limit", "2"))
    )
    thread.start()
    appended = []
    with Ledger.open(live) as ledger:
        writer = Writer(ledger, Clock(), "job", "dynamic", random.Random(1))
        while thread.is_alive():
            appended.append(writer.window(0, 0.1, 1))
            thread.join(timeout=0.02)
    found = [json.loads(line)["position"] for line in result[0].stdout.splitlines()]
    assert len(found) == 2
    assert found[1] == found[0] + 1
    assert set(found) <= set(appended)


# -- SQL and the report --------------------------------------------------------------------


def test_sql_from_argument_file_and_stdin(book: Path, tmp_path: Path) -> None:
    query = "select job, count(*) as n from iterations group by job order by job"
    expected = [{"job": f"demo-{name}", "n": 3} for name in ("dynamic", "static", "timeshared")]
    assert rows_of("sql", query, "--ledger", str(book)) == expected
    (tmp_path / "query.sql").write_text(query, encoding="utf-8")
    assert rows_of("sql", f"@{tmp_path / 'query.sql'}", "--ledger", str(book)) == expected
    result = invoke("sql", "-", "--ledger", str(book), "--format", "csv", stdin=query)
    assert result.stdout.splitlines() == [
        *("job,n", "demo-dynamic,3", "demo-static,3", "demo-timeshared,3")
    ]


def test_sql_writes_non_finite_numbers_by_name(book: Path) -> None:
    rows = rows_of("sql", "select 'nan'::double as a, '-inf'::double as b", "--ledger", str(book))
    assert rows == [{"a": "NaN", "b": "-Infinity"}]


def test_report_is_written_and_named(book: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    arguments = ("report", "--ledger", str(book), "-o", str(target), "--job", "demo-static")
    result = invoke(*arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    assert str(target) in result.stderr
    assert "<h1>Moves of demo-static</h1>" in target.read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


# -- operating -----------------------------------------------------------------------------


def test_propose_goes_through_the_gate_and_waits_for_the_controller(live: str) -> None:
    arguments = ["propose", "--ledger", live, "--strategy", "pause", "--format", "json"]
    result = invoke(*arguments, *ALL_ROLLOUT, "--gain", "2")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["status"] == "proposed"
    with Ledger.open(live) as ledger:
        known = ledger.state().job("job").operations[told["operation"]]
        assert known.after == Topology(components={**SPLIT.components, **ROLL.components})
        stored = next(ledger.read(operation=told["operation"]))
        assert stored.actor.startswith("operator:")
        assert stored.body["proposer"] == "operator"
        # What a controller does with it: the proposal of another actor is granted and runs.
        grant = Gate(ledger).grant("job", told["operation"])
        assert grant.operation == told["operation"]


def test_propose_tells_the_rule_of_a_rejection(live: str) -> None:
    arguments = ["propose", "--ledger", live, "--strategy", "pause"]
    result = invoke(*arguments, "--after", "rollout=n/7")
    assert result.exit_code == 1
    assert " rejected by rule " in result.stdout
    assert len(result.stdout.splitlines()) == 1
    rejected = rows_of("log", "--ledger", live, "--type", "ReallocationRejected")
    assert rejected[0]["body"]["rule"] in result.stdout


def test_propose_waits_and_says_how_it_ended(live: str) -> None:
    def abandon() -> None:
        with Ledger.open(live) as ledger:
            for stored in ledger.follow(-1):
                if stored.type == "ReallocationProposed":
                    Gate(ledger).abandon("job", str(stored.operation), "not now")
                    return

    thread = threading.Thread(target=abandon)
    thread.start()
    result = invoke(
        *("propose", "--ledger", live, "--strategy", "pause", "--wait", "20"),
        *ALL_ROLLOUT,
    )
    thread.join()
    assert result.exit_code == 1
    assert result.stdout.strip().endswith("abandoned: not now")
    late = invoke(
        *("propose", "--ledger", live, "--strategy", "pause", "--wait", "0"),
        *ALL_ROLLOUT,
    )
    assert_one_line(late.exit_code, late.stderr, "found it proposed", "controller runs")


def test_a_topology_from_words_and_from_a_file(tmp_path: Path) -> None:
    read = cli_options_topology()
    assert read("rollout=n/0,n/1 inference= trainer=", SPLIT).placement() == ROLL.placement()
    assert read("rollout=n/0", SPLIT) == SPLIT
    path = tmp_path / "after.json"
    path.write_text(ROLL.model_dump_json(), encoding="utf-8")
    assert read(str(path), SPLIT) == ROLL
    for text in ("nothing", "=n/0", "rollout=cpu0", "rollout=n/0 trainer", str(tmp_path)):
        with pytest.raises(InvalidInput, match="expected"):
            read(text, SPLIT)


def cli_options_topology() -> Any:
    from shiftbook.ledger.commands.operate import read_topology

    return read_topology


def test_freeze_and_thaw_record_who_and_why(live: str) -> None:
    ledger = ["--ledger", live]
    assert invoke("freeze", "job", *ledger, "--reason", "upgrade").exit_code == 0
    again = invoke("freeze", "job", *ledger, "--reason", "upgrade")
    assert again.exit_code == 0
    assert "already: upgrade" in again.stdout
    refused = invoke(
        *("propose", *ledger, "--strategy", "pause"),
        *ALL_ROLLOUT,
    )
    assert refused.exit_code == 1
    assert "safe" in refused.stdout
    assert invoke("thaw", "job", *ledger, "--reason", "done").exit_code == 0
    assert "not in safe mode" in invoke("thaw", "job", *ledger, "--reason", "done").stdout
    entered, left = rows_of("log", *ledger, "--type", "SafeModeEntered", "--type", "SafeModeLeft")
    assert entered["body"]["by"].startswith("operator")
    assert (entered["body"]["reason"], left["body"]["reason"]) == ("upgrade", "done")


def test_a_reason_is_demanded(live: str) -> None:
    for command in ("freeze", "thaw"):
        result = invoke(command, "job", "--ledger", live)
        assert_one_line(result.exit_code, result.stderr, "--reason")
        result = invoke(command, "job", "--ledger", live, "--reason", " ")
        assert_one_line(result.exit_code, result.stderr, "expected a reason")


def test_recover_without_open_operations_says_so(live: str) -> None:
    result = invoke("recover", "job", "--ledger", live)
    assert result.exit_code == 0
    assert "nothing to recover" in result.stderr
    assert rows_of("recover", "--ledger", live) == []


def test_recover_abandons_restores_and_poisons(live: str) -> None:
    ledger = ["--ledger", live]
    after = ALL_ROLLOUT
    assert invoke("propose", *ledger, "--strategy", "pause", *after).exit_code == 0
    rows = rows_of("recover", "job", *ledger)
    assert [(row["found"], row["ended"]) for row in rows] == [("proposed", "abandoned")]

    def granted() -> str:
        told = invoke("propose", *ledger, "--strategy", "pause", *after, "--format", "json")
        operation = str(json.loads(told.stdout)["operation"])
        with Ledger.open(live) as opened:
            gate = Gate(opened)
            gate.quiesced(gate.grant("job", operation), [], kv_tokens_lost=0, quiesce_s=0.0)
        return operation

    granted()
    mover = f"{__name__}:open_settled_mover"
    sys.modules.setdefault(
        __name__, sys.modules[test_recover_abandons_restores_and_poisons.__module__]
    )
    rows = rows_of("recover", "job", *ledger, "--mover", mover)
    assert [(row["found"], row["ended"]) for row in rows] == [("quiesced", "rolled_back")]
    operation = granted()
    result = invoke("recover", "job", *ledger, "--no-mover", "--format", "json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)[0]["ended"] == "poisoned"
    quarantine = {str(known) for known in json_state(live)["quarantine"].values()}
    assert quarantine == {operation}
    lifted = invoke("thaw", "job", *ledger, "--reason", "looked", "--lift", operation)
    assert lifted.exit_code == 0, lifted.stderr
    assert json_state(live)["quarantine"] == {}


def json_state(url: str) -> Any:
    return rows_of("state", "job", "--ledger", url)


class SettledMover:
    """A mover whose processes are always where they are wanted."""

    def __init__(self) -> None:
        self.topology = SPLIT

    def inspect(self) -> Topology:
        return self.topology

    def restore(self, topology: Topology, grant: object) -> None:
        self.topology = topology

    def finish(self, topology: Topology, grant: object) -> None:
        self.topology = topology

    def close(self) -> None:
        self.topology = Topology()


def open_settled_mover(ledger: Ledger, job: str) -> SettledMover:
    return SettledMover()


# -- doctor --------------------------------------------------------------------------------


def test_doctor_reports_every_check(book: Path) -> None:
    result = invoke("doctor", "--ledger", str(book), "--format", "json")
    checks = {row["check"]: row for row in json.loads(result.stdout)}
    assert {"cores", "memory", "python", "sqlite", "ray", "file system", "disk space"} <= set(
        checks
    )
    assert {row["status"] for row in checks.values()} <= {"ok", "warning", "wrong"}
    assert all(row["fix"] for row in checks.values() if row["status"] != "ok")
    wrong = [row for row in checks.values() if row["status"] == "wrong"]
    assert result.exit_code == (1 if wrong else 0)
    assert checks["ledger"]["status"] == "ok"
    assert checks["clock"]["status"] == "ok"


def test_doctor_finds_each_fault(tmp_path: Path) -> None:
    assert health.check_cores(1).status == "wrong"
    assert health.check_cores(2).status == "ok"
    assert health.check_memory(1 << 30).status == "warning"
    assert health.check_python((3, 10)).status == "wrong"
    assert health.check_sqlite((3, 40, 1)).status == "warning"
    assert health.check_sqlite((3, 51, 3)).status == "ok"
    without_ray = {c.name: c for c in health.check_extras(lambda n: "1" if n != "ray" else None)}
    assert [n for n, c in without_ray.items() if c.status != "ok"] == ["extra job"]
    assert without_ray["extra job"].fix == "pip install 'shiftbook[job]'"
    assert health.check_ray("127.0.0.1:1").status == "warning"
    assert health.check_clock(10**18 + 5 * 10**9, 10**18).status == "wrong"
    assert health.check_clock(10**18, 10**18 + 5).status == "ok"
    path = tmp_path / "broken.db"
    path.write_bytes(b"no ledger at all")
    result = invoke("doctor", "--ledger", str(path), "--format", "json")
    checks = {row["check"]: row for row in json.loads(result.stdout)}
    assert result.exit_code == 1
    assert checks["ledger"]["status"] == "wrong"
    assert checks["ledger"]["fix"]


# -- edges, as real processes --------------------------------------------------------------

BAD: list[tuple[list[str], list[str]]] = [
    (["log", "--ledger", "mysql://user:secret@host/db"], ["mysql"]),
    (["log", "--ledger", "nonsense://"], ["sqlite:///", "found nonsense://"]),
    (["log", "--ledger", ""], ["expected a ledger URL", "SQLite file"]),
    (["log", "--ledger", "missing.db"], ["missing.db", "found nothing"]),
    (["jobs"], ["shiftbook.db", "found nothing"]),
    (["log", "--ledger", "BOOK", "--job", "nobody"], ["no job 'nobody'", "demo-dynamic"]),
    (["state", "nobody", "--ledger", "BOOK"], ["no job 'nobody'", "demo-dynamic"]),
    (["state", "--ledger", "BOOK"], ["3 jobs", "name one of"]),
    (["show", "-5", "--ledger", "BOOK"], ["no event at position -5", "0 to"]),
    (["show", "99999", "--ledger", "BOOK"], ["no event at position 99999", "0 to"]),
    (["show", "nothing", "--ledger", "BOOK"], ["no operation 'nothing'", "shiftbook sql"]),
    (["show", "--nothing", "--ledger", "BOOK"], ["No such option"]),
    (["show", "--ledger", "BOOK"], ["TARGET", "shiftbook show --help"]),
    (["log", "--ledger", "BOOK", "--after", "-7"], ["-7", ">=-1"]),
    (["log", "--ledger", "BOOK", "--limit", "0"], ["0", "shiftbook log --help"]),
    (["log", "--ledger", "BOOK", "--since", "yesterday"], ["expected a time", "'yesterday'"]),
    (["log", "--ledger", "BOOK", "--type", "LeaseGrantd"], ["did you mean LeaseGranted"]),
    (["log", "--ledger", "BOOK", "--type", "Nope"], ["no event type 'Nope'", "docs/sql.md"]),
    (["follow", "--ledger", "BOOK", "--type", "Nope"], ["no event type 'Nope'"]),
    (["log", "--ledger", "BOOK", "--operation", "nope"], ["no event of an operation 'nope'"]),
    (["log", "--ledger", "BOOK", "--component", "nope"], ["no component 'nope'", "state JOB"]),
    (["log", "--ledger", "BOOK", "--format", "xml"], ["xml", "jsonl"]),
    (["log", "--bad-option"], ["--bad-option", "shiftbook log --help"]),
    (["nocommand"], ["no command 'nocommand'", "doctor"]),
    (["sql", "selec 1", "--ledger", "BOOK"], ["syntax error", "reallocations"]),
    (["sql", "from moves", "--ledger", "BOOK"], ["moves", "reallocations"]),
    (["sql", "drop table events", "--ledger", "BOOK"], ["expected a SELECT", "DROP"]),
    (["sql", "select 1; select 2", "--ledger", "BOOK"], ["expected one statement"]),
    (["sql", "", "--ledger", "BOOK"], ["expected a query"]),
    (["sql", "@missing.sql", "--ledger", "BOOK"], ["missing.sql", "check the path"]),
    (["report", "--ledger", "BOOK", "-o", "no/such/folder/r.html"], ["expected to write"]),
    (["report", "--ledger", "BOOK", "--verdict", "missing.json"], ["missing.json"]),
    (["report", "--ledger", "BOOK", "--job", "nobody"], ["no job 'nobody'"]),
    (["follow", "--ledger", "BOOK", "--format", "json"], ["--format jsonl"]),
    (
        ["propose", "--ledger", "BOOK", "--strategy", "pause", "--after", "rollout"],
        ["name one of"],
    ),
    (
        ["propose", "--ledger", "BOOK", "--job", "demo-static", "--strategy", "pause"],
        ["--after"],
    ),
    (
        [
            *("propose", "--ledger", "BOOK", "--job", "demo-static", "--strategy", "pause"),
            *("--after", "rollout=n/0,n/1"),
        ],
        ["expected an open job", "closed"],
    ),
    (["freeze", "nobody", "--ledger", "BOOK", "--reason", "x"], ["no job 'nobody'"]),
    (
        ["freeze", "demo-static", "--ledger", "BOOK", "--reason", "x"],
        ["closed", "`shiftbook jobs`"],
    ),
    (["thaw", "demo-static", "--ledger", "BOOK", "--reason", "x"], ["closed", "`shiftbook jobs`"]),
    (["recover", "nobody", "--ledger", "BOOK"], ["no job 'nobody'"]),
    (["recover", "--ledger", "BOOK", "--mover", "x", "--no-mover"], ["exclude each other"]),
]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=lambda value: " ".join(value)[:60])
def test_bad_input_is_one_line_with_exit_code_2(
    arguments: Sequence[str],
    said: Sequence[str],
    book: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHIFTBOOK_DEBUG", raising=False)
    monkeypatch.delenv("SHIFTBOOK_LEDGER", raising=False)
    result = invoke(*(str(book) if word == "BOOK" else word for word in arguments))
    assert_one_line(result.exit_code, result.stderr, *said)
    assert result.stdout == ""
    assert "secret" not in result.stderr
    assert list(tmp_path.iterdir()) == [], "a failed command leaves nothing behind"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["log", "--ledger", "nonsense://"], ["sqlite:///"]),
        (["state", "nobody", "--ledger", "BOOK"], ["no job 'nobody'"]),
        (["show", "-5", "--ledger", "BOOK"], ["no event at position -5"]),
        (["sql", "selec 1", "--ledger", "BOOK"], ["syntax error"]),
        (["nocommand"], ["no command"]),
    ],
)
def test_the_same_as_real_processes(
    arguments: Sequence[str], said: Sequence[str], book: Path, tmp_path: Path
) -> None:
    done = run(*(str(book) if word == "BOOK" else word for word in arguments), cwd=tmp_path)
    assert_one_line(done.returncode, done.stderr, *said)
    assert done.stdout == ""


@pytest.mark.parametrize("content", [b"", b"no database", b"SQLite format 3\x00" + b"\x00" * 4096])
def test_a_file_that_is_no_ledger(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    path.write_bytes(content)
    for arguments in (["log"], ["sql", "from events"], ["report", "-o", str(tmp_path / "r.html")]):
        done = invoke(*arguments, "--ledger", str(path))
        assert_one_line(done.exit_code, done.stderr, "other.db")
    assert path.read_bytes() == content


def test_a_folder_that_cannot_be_written(book: Path, tmp_path: Path) -> None:
    """Reading commands work there; writing ones say what to do. Root may write anywhere, so for
    root the processes run without that capability."""
    folder = tmp_path / "sealed"
    folder.mkdir()
    (folder / "ledger.db").write_bytes(closed_copy(book, tmp_path))
    folder.chmod(0o555)
    (folder / "ledger.db").chmod(0o444)
    sealed: tuple[str, ...] = ()
    if os.getuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root may write anywhere, and there is no setpriv to take that away")
        powers = "-dac_override,-dac_read_search"
        sealed = ("setpriv", "--inh-caps", powers, "--bounding-set", powers)
    ledger = ("--ledger", str(folder / "ledger.db"))
    done = run("sql", "select count(*) as n from iterations", *ledger, cwd=tmp_path, under=sealed)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["n", "9"]
    done = run("report", *ledger, "-o", str(folder / "r.html"), cwd=tmp_path, under=sealed)
    assert_one_line(done.returncode, done.stderr, "expected to write", "folder")
    done = run("freeze", "demo-static", "--reason", "x", *ledger, cwd=tmp_path, under=sealed)
    assert_one_line(done.returncode, done.stderr, "writable")
    assert sorted(path.name for path in folder.iterdir()) == ["ledger.db"]


def closed_copy(book: Path, tmp_path: Path) -> bytes:
    """The ledger as one file, its log copied into it."""
    import sqlite3

    target = tmp_path / "copy.db"
    with sqlite3.connect(book) as source, sqlite3.connect(target) as copy:
        source.backup(copy)
    source.close()
    copy.close()
    return target.read_bytes()


@pytest.mark.parametrize(
    "words",
    [
        ("jobs",),
        ("show", "3"),
        ("verify", "--integrity-only"),
        ("report", "-o", "page.html"),
        ("key", "new", "-o", "new.key"),
        ("freeze", "demo-dynamic", "--reason", "x"),
    ],
    ids=lambda words: words[0],
)
def test_a_closed_output_is_told_before_anything_is_done(
    words: tuple[str, ...], book: Path, tmp_path: Path
) -> None:
    closed = ("sh", "-c", 'exec "$@" >&-', "sh")
    variables = dict(os.environ, SHIFTBOOK_LEDGER=str(book))
    done = subprocess.run(
        [*closed, *SHIFTBOOK, *words],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert_one_line(done.returncode, done.stderr, "standard output", "/dev/null")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- 2>&-"])
def test_no_file_takes_the_place_of_a_closed_stream(
    closed: str, book: Path, tmp_path: Path
) -> None:
    """A command that complains on stderr, while a ledger is open, writes nothing into it."""
    (tmp_path / "ledger.db").write_bytes(closed_copy(book, tmp_path))
    words = ["freeze", "nobody", "--reason", "x", "--ledger", str(tmp_path / "ledger.db")]
    code = (
        "import json, os\n"
        "from shiftbook.ledger.cli import main\n"
        "try:\n"
        f"    main({words!r})\n"
        "finally:\n"
        "    print(json.dumps([os.readlink(f'/proc/self/fd/{n}') for n in (0, 2)]))\n"
    )
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 2
    at = json.loads(done.stdout)
    for number, redirection in ((0, "<&-"), (1, "2>&-")):
        if redirection in closed.split():
            assert at[number] == "/dev/null"


def test_a_reader_that_goes_away_is_no_error(book: Path) -> None:
    done = subprocess.run(
        " ".join(["exec 3>&1;", *map(quoted, SHIFTBOOK), "log --ledger", quoted(str(book)), "|"])
        + " head -n 1; echo ${PIPESTATUS[0]}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""


def quoted(text: str) -> str:
    import shlex

    return shlex.quote(text)


def test_the_environment_names_the_ledger(book: Path, tmp_path: Path) -> None:
    done = run("jobs", "--format", "csv", cwd=tmp_path, env={"SHIFTBOOK_LEDGER": str(book)})
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 4


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("ray", "job"),
        ("torch", "job"),
        ("numba.core", "job"),
        ("vllm", "vllm"),
        ("psycopg", "postgres"),
    ],
)
def test_a_missing_extra_names_what_to_install(
    module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @click.command()
    def needs_it() -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    use_command(monkeypatch, needs_it)
    result = invoke("needs-it")
    assert_one_line(result.exit_code, result.stderr, f"pip install 'shiftbook[{extra}]'", module)


def use_command(monkeypatch: pytest.MonkeyPatch, command: click.Command) -> None:
    """Register a command under its name, for this test."""
    real = cli.entry_points

    class Point(EntryPoint):
        def load(self) -> Any:
            return command

    point = Point(name=str(command.name), value="x:y", group=cli.COMMAND_GROUP)

    def points(**wanted: str) -> Any:
        if wanted.get("name") == command.name:
            return [point]
        return [*real(**wanted), *([] if "name" in wanted else [point])]

    monkeypatch.setattr(cli, "entry_points", points)


def test_an_extra_that_is_really_missing(tmp_path: Path) -> None:
    """A command whose work needs Ray, in a Python that cannot find it."""
    code = (
        "import sys\n"
        "class Gone:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('ray', 'torch', 'numba'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Gone())\n"
        "from shiftbook.ledger.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    path = tmp_path / "job.db"
    clock = Clock()
    with open_sample(path, clock) as ledger:
        writer = Writer(ledger, clock, "job", "dynamic", random.Random(1))
        writer.open()
        writer.move(ROLL, "pause", 0.5, end="granted")
    (tmp_path / "needs_ray.py").write_text(
        "def open_mover(ledger, job):\n    import ray\n", encoding="utf-8"
    )
    arguments = ["recover", "--ledger", str(path), "--mover", "needs_ray:open_mover"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert_one_line(done.returncode, done.stderr, "pip install 'shiftbook[job]'")


def test_an_unexpected_error_is_one_line_and_a_traceback_on_demand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @click.command()
    def breaks() -> None:
        raise ZeroDivisionError("split\nover lines")

    use_command(monkeypatch, breaks)
    monkeypatch.delenv("SHIFTBOOK_DEBUG", raising=False)
    result = invoke("breaks")
    assert_one_line(
        result.exit_code, result.stderr, "ZeroDivisionError: split over lines", "SHIFTBOOK_DEBUG=1"
    )
    monkeypatch.setenv("SHIFTBOOK_DEBUG", "1")
    result = invoke("breaks")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr


def test_errors_carry_their_own_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bad(ShiftbookError):
        exit_code = 1

    @click.command()
    def judges() -> None:
        raise Bad("the thing asked about is bad")

    use_command(monkeypatch, judges)
    result = invoke("judges")
    assert (result.exit_code, result.stderr) == (1, "shiftbook: the thing asked about is bad\n")


def test_what_stands_in_names_cannot_steer_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    clock = Clock()
    with open_sample(path, clock) as ledger:
        Writer(ledger, clock, "job\x1b[31m[bold]x", "static", random.Random(1)).open()
    text = invoke("jobs", "--ledger", str(path)).stdout
    assert "\x1b" not in text
    assert "[bold]x" in text


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of whoever runs the tests names no ledger."""
    monkeypatch.delenv("SHIFTBOOK_LEDGER", raising=False)
