"""A store that is damaged or hostile: the real commands refuse each lie with one sentence, in bounded memory, and nothing lands
outside of the run directory."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from forging import forge, lay, streamed

from perdure.training import events
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.storage.folder import FolderStore
from perdure.training.travel.push import push

MadeRun = Any
CHILD = """
import sys
from perdure.cli.main import main
code = main(sys.argv[1:])
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(peak.split()[1], file=sys.stderr)
sys.exit(code)
"""
MANIFEST, INDEX = "manifest.json", "rank-00000.index"
GIB = 1 << 30
KINDS = ("repaired", "quarantined")


def perdure(*arguments: object, env: dict[str, str] | None = None, max_mib: int = 200) -> tuple[int, str]:
    """Exit code and what it said; its peak memory is bounded."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, **(env or {})},
    )
    *lines, peak = done.stderr.splitlines()
    assert "Traceback" not in done.stderr, done.stderr
    assert int(peak) < max_mib << 10, f"{int(peak) >> 10} MiB"
    return done.returncode, "\n".join(lines)


def inflated(path: Path, size: int) -> None:
    with open(path, "r+b") as file:
        file.truncate(size)  # sparse


def other_files(folder: Path) -> None:
    records = json.loads((folder / MANIFEST).read_bytes())["files"]
    forge(folder, files=[{**record, "name": f"../../../{record['name']}"} for record in records])


def pack_longer_than_said(folder: Path) -> None:
    records = json.loads((folder / MANIFEST).read_bytes())["files"]
    records[0]["bytes"] += 1
    forge(folder, files=records, stored_bytes=sum(record["bytes"] for record in records))


HARM: dict[str, Callable[[Path], Any]] = {
    "index that unfolds to a gibibyte": lambda folder: lay(folder, streamed(bytes(GIB))),
    "index that nests without end": lambda folder: lay(folder, streamed(b"\x91" * 10_000_000)),
    "manifest of a gibibyte": lambda folder: inflated(folder / MANIFEST, GIB),
    "manifest of another run": lambda folder: forge(folder, run="other-1"),
    "manifest of another step": lambda folder: forge(folder, step=7),
    "names that lead out": other_files,
    "a base that is itself": lambda folder: forge(folder, base={"name": folder.name, "digest": "0" * 64}),
    "sizes that are not those of the files": pack_longer_than_said,
    "counts that are not those of the indexes": lambda folder: forge(folder, leaves=10**9),
    "index of a gibibyte": lambda folder: inflated(folder / INDEX, GIB),
}


@pytest.fixture
def hostile(made: MadeRun, tmp_path: Path) -> Path:
    """A store with one good checkpoint, and after it one of each harm, newest last; launch records and facts lie too."""
    store = FolderStore(tmp_path / "store")
    for step in range(100, 100 * len(HARM) + 101, 100):
        push(made.dir, store, made.commit(step, 1))
    for step, harm in zip(count(200, 100), HARM.values(), strict=False):
        harm(store.root / "checkpoints" / str(CheckpointName(step, 1)))
    (store.root / "launches" / "0002.json").write_bytes(b"{}")
    inflated(store.root / "launches" / "0002.json", GIB)
    inflated(store.root / "checkpoints" / str(CheckpointName(100, 1)) / "check.json", GIB)
    (store.root / "checkpoints" / "..-0001").mkdir()
    (store.root / "checkpoints" / "..-0001" / MANIFEST).write_bytes(b"{}")
    return store.root


def test_pull_walks_past_every_lie_to_the_good_checkpoint_if_there_is_one(hostile: Path, made: MadeRun, tmp_path: Path) -> None:
    elsewhere = RunDir(tmp_path / "new" / "run")
    before = set(tmp_path.rglob("*"))
    code, said = perdure("pull", hostile.as_uri(), elsewhere.root)
    assert code == 0, said
    found = [event.data["text"] for event in events.read(elsewhere) if event.kind == "notice"]
    for step, what in zip(count(200, 100), HARM, strict=False):
        told = [text for text in found if str(CheckpointName(step, 1)) in text]
        assert len(told) == 1, what
        assert told[0].count("\n") == 0
    assert any("launch record 2" in text for text in found)
    assert [path.name for path in elsewhere.checkpoints.iterdir()] == [str(CheckpointName(100, 1))]
    assert all(path.is_relative_to(elsewhere.root.parent) for path in set(tmp_path.rglob("*")) - before)
    (hostile / "checkpoints" / str(CheckpointName(100, 1)) / "rank-00000.pack").write_bytes(b"x")
    code, said = perdure("pull", hostile.as_uri(), tmp_path / "none")
    assert code == 5
    assert "no checkpoint is good" in said
    inflated(hostile / "run.json", GIB)
    code, said = perdure("pull", hostile.as_uri(), tmp_path / "newer")
    assert code == 6
    assert "run.json is not a run's" in said
    assert not (tmp_path / "newer" / "run.json").exists()


def test_checkpoint_larger_than_any_disk_is_refused_before_a_byte_is_fetched(
    made: MadeRun, folder_store: FolderStore, tmp_path: Path
) -> None:
    name, size = made.commit(100, 1), 10 * 10**12
    push(made.dir, folder_store, name)
    folder = folder_store.root / "checkpoints" / str(name)
    records = json.loads((folder / MANIFEST).read_bytes())["files"]
    records[0]["bytes"] = size
    forge(folder, files=records, stored_bytes=size + records[1]["bytes"])
    inflated(folder / "rank-00000.pack", size)
    code, said = perdure("pull", folder_store.url, tmp_path / "new")
    assert code == 8
    assert "are free" in said
    assert not list(tmp_path.joinpath("new").rglob("*.pack"))


def test_scrub_finds_every_lie_and_repairs_what_is_ours_to_repair(hostile: Path, made: MadeRun, tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    (tmp_path / "train.py").touch()
    settings = f'[run]\nname = "gpt"\nentry = "train.py:f"\nsteps = 1000\nchunk = 100\ndir = "{made.dir.root}"\n'
    toml.write_text(f'{settings}[store]\nurl = "{hostile.as_uri()}"\n')
    here = {path: path.read_bytes() for path in made.dir.checkpoints.rglob("rank-*")}
    code, said = perdure("scrub", toml, "--budget", "100%")
    assert code == 5, said
    assert {path: path.read_bytes() for path in made.dir.checkpoints.rglob("rank-*")} == here
    found = {kind: [event.data["step"] for event in events.read(made.dir) if event.kind == kind] for kind in KINDS}
    assert {*found["repaired"], *found["quarantined"]} == set(range(200, 100 * len(HARM) + 101, 100))
    mended = {"manifest of a gibibyte", "names that lead out", "a base that is itself", "index of a gibibyte"}
    assert {list(HARM)[step // 100 - 2] for step in found["repaired"]} == mended, "the others are whole and not ours"


# a server whose listings lie


def listing(keys: list[tuple[str, int]], token: str) -> bytes:
    items = "".join(f"<Contents><Key>{key}</Key><Size>{size}</Size></Contents>" for key, size in keys)
    more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    return f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{items}{more}</ListBucketResult>'.encode()


Page = Callable[[str, int], bytes]
"""The answer to a listing: from the prefix asked for, and how many pages came before."""


@contextmanager
def lying(objects: dict[str, bytes], page: Page) -> Iterator[str]:
    pages = count()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = urlsplit(self.path)
            query = parse_qs(asked.query)
            if "list-type" in query:
                self.answer(200, page(query.get("prefix", [""])[0], next(pages)))
            else:
                key = asked.path.removeprefix("/bucket/")
                self.answer(200 if key in objects else 404, objects.get(key, b"<Error><Code>NoSuchKey</Code></Error>"))

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


KEYS = {"AWS_ACCESS_KEY_ID": "AK", "AWS_SECRET_ACCESS_KEY": "sk", "AWS_EC2_METADATA_DISABLED": "true"}
LIES: dict[str, tuple[Page, str]] = {
    "never ends": (lambda prefix, _: listing([(f"{prefix}x", 1)], "again"), "the listing does not end"),
    "of other keys": (lambda prefix, _: listing([("../../etc/passwd", 1)], ""), "lists keys of other prefixes"),
}


@pytest.mark.parametrize("lie", LIES)
def test_listing_that_lies_is_refused(made: MadeRun, tmp_path: Path, lie: str) -> None:
    page, sentence = LIES[lie]
    with lying({"run/run.json": made.dir.run_json.read_bytes()}, page) as endpoint:
        code, said = perdure("pull", "s3://bucket/run", tmp_path / "new", "--endpoint-url", endpoint, "--region", "x", env=KEYS)
    assert code == 6
    assert sentence in said
    assert not (tmp_path / "new" / "run.json").exists()


@pytest.mark.chaos
def test_a_million_keys_are_refused_in_bounded_memory(made: MadeRun, tmp_path: Path) -> None:
    def page(prefix: str, number: int) -> bytes:
        return listing([(f"{prefix}{number * 1000 + one:018d}.json", 10**12) for one in range(1000)], f"after-{number}")

    with lying({"run/run.json": made.dir.run_json.read_bytes()}, page) as endpoint:
        options = ("--endpoint-url", endpoint, "--region", "x")
        code, said = perdure("pull", "s3://bucket/run", tmp_path / "new", *options, env=KEYS, max_mib=700)
    assert code == 6
    assert "the listing does not end" in said
