"""`prune` shows what goes and why, then deletes exactly that; and says so when there is nothing to do."""

import shutil
import time
from collections.abc import Callable
from typing import Any

from storage.proxy import proxy_to

from perdure.training import files
from perdure.training.checkpoint.facts import Fact, write_fact
from perdure.training.checkpoint.run_info import create_run_info
from perdure.training.config import load_config
from perdure.training.run_dir import CheckpointName

Command = Callable[..., Any]


def proven(made: Any, *steps: int, copy: str = "local") -> None:
    place = load_config(made.toml).store_url if copy == "store" else ""
    for step in steps:
        fact = Fact(copy=copy, checked_at=time.time(), result="good", location=place)
        write_fact(made.run, CheckpointName(step, 1), fact)


def stored(made: Any, *steps: int) -> None:
    """The run of these tests has a store: only what is in it counts."""
    proven(made, *steps)
    proven(made, *steps, copy="store")


def names(made: Any) -> list[str]:
    return sorted(path.name for path in made.run.checkpoints.iterdir())


def test_a_dry_run_shows_a_reason_for_each_and_deletes_nothing(made: Any, command: Command) -> None:
    stored(made, 20, 40)
    answer = command("prune", made.run.root, "--keep-last", "1", "--dry-run")
    head, first, second, last = answer.out.splitlines()
    assert head.split() == ["checkpoint", "action", "on", "disk", "reason"]
    assert first.split()[:2] == ["000000000020-0001", "remove"]
    assert first.endswith("older than what is kept")
    assert second.split()[:2] == ["000000000040-0001", "keep"]
    assert second.endswith("one of the newest 1; the newest verified")
    assert last.startswith("would delete 1 checkpoint and 0 leftovers, ")
    assert len(names(made)) == 2


def test_what_was_shown_is_deleted_and_the_bytes_are_those_of_the_disk(made: Any, command: Command) -> None:
    stored(made, 20, 40)
    size = sum(path.stat().st_size for path in made.run.checkpoint(CheckpointName(20, 1)).iterdir())
    answer = command("prune", made.toml, "--set", "retention.keep_last=1", "--json").json
    assert answer["removed"] == ["000000000020-0001"]
    assert (answer["keep_last"], answer["dry_run"], answer["freed_bytes"]) == (1, False, size)
    assert [one["action"] for one in answer["checkpoints"]] == ["remove", "keep"]
    assert names(made) == ["000000000040-0001"]
    again = command("prune", made.run.root, "--keep-last", "1")
    assert again.code == 0
    assert "nothing to prune" in again.out
    assert command("ls", made.run.root, "--json").json["checkpoints"][0]["trust"] == "replicated"


def test_what_is_not_in_the_store_stays(made: Any, command: Command) -> None:
    proven(made, 20, 40)
    answer = command("prune", made.run.root, "--keep-last", "1")
    assert "not in the store yet" in answer.out
    assert "nothing to prune" in answer.out
    assert len(names(made)) == 2


def test_a_torn_folder_is_listed_and_swept(made: Any, command: Command) -> None:
    torn = made.run.checkpoint(CheckpointName(50, 1))
    torn.mkdir()
    (torn / "rank-00000.pack").write_bytes(b"half")
    shown = command("prune", made.run.root, "--keep-last", "all", "--dry-run").out
    assert "leftover: never committed" in shown
    assert "deleted 0 checkpoints and 1 leftover, 4 B freed" in command("prune", made.run.root, "--keep-last", "all").out
    assert not torn.exists()


def test_by_default_a_run_keeps_everything(made: Any, command: Command) -> None:
    stored(made, 20, 40)
    answer = command("prune", made.toml)
    assert "no limit is set: nothing may go" in answer.out
    assert len(names(made)) == 2


def test_a_run_directory_does_not_say_how_many(made: Any, command: Command) -> None:
    answer = command("prune", made.run.root)
    assert answer.code == 2
    assert "--keep-last N" in answer.err
    assert command("prune", made.run.root, "--keep-last", "-1").code == 2


def test_a_run_without_checkpoints_has_nothing_to_prune(made: Any, command: Command) -> None:
    stored(made, 20, 40)
    for path in sorted(made.run.checkpoints.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert command("prune", made.run.root, "--keep-last", "1").out.startswith("nothing to prune")


def test_flags_take_the_place_of_the_settings_and_add_up(made: Any, command: Command) -> None:
    made.write(60)
    stored(made, 20, 40, 60)
    section = ("--set", "retention.keep_last=3")
    assert "nothing to prune" in command("prune", made.toml, *section, "--dry-run").out
    planned = command("prune", made.toml, *section, "--keep-last", "1", "--keep-every", "20", "--dry-run", "--json").json
    assert (planned["keep_last"], planned["keep_every"]) == (1, 20)
    assert [one["action"] for one in planned["checkpoints"]] == ["keep", "keep", "keep"]
    done = command("prune", made.toml, *section, "--keep-last", "1", "--keep-within", "36h", "--keep-every", "40")
    assert "within 36h of the newest" in done.out
    done = command("prune", made.toml, *section, "--keep-last", "1", "--keep-every", "40").out
    assert "step is a multiple of 40" in done
    assert names(made) == ["000000000040-0001", "000000000060-0001"]


def test_a_flag_that_cannot_be_deletes_nothing(made: Any, command: Command) -> None:
    """Case H9."""
    stored(made, 20, 40)
    for flags in (("--keep-last", "-1"), ("--keep-last", "0"), ("--keep-within", "7m"), ("--keep-daily", "all")):
        answer = command("prune", made.run.root, *flags)
        assert (answer.code, flags[0] in answer.err) == (2, True)
    for number in ("all", "1000000000"):
        assert command("prune", made.run.root, "--keep-last", number).out.startswith("checkpoint")
    assert len(names(made)) == 2


def test_a_place_is_shown_pruned_and_said_by_its_own_retention(made: Any, command: Command) -> None:
    proven(made, 20, 40)
    assert command("push", made.run.root).code == 0
    section = ("--set", "store.retention.keep_last=1")
    assert "no limit is set" in command("prune", made.toml, "--tier", "store").out
    shown = command("prune", made.toml, "--tier", "store", *section, "--dry-run").out
    assert shown.splitlines()[1].split()[:2] == ["000000000020-0001", "remove"]
    assert "would delete 1 checkpoint and 0 leftovers from file://" in shown
    answer = command("prune", made.toml, "--tier", "store", *section, "--json").json
    assert (answer["place"], answer["removed"], answer["keep_last"]) == ("store", ["000000000020-0001"], 1)
    assert names(made) == ["000000000020-0001", "000000000040-0001"], "what is here is not touched"
    listed = command("ls", made.run.root, "--json").json["checkpoints"]
    assert [one["trust"] for one in listed] == ["verified", "replicated"]
    assert "nothing to push" in command("push", made.run.root).out
    assert "nothing to prune in file://" in command("prune", made.run.root, "--tier", "store", "--keep-last", "1").out
    for arguments, said in ((["--tier", "store"], "--keep-last N"), (["--tier", "share"], "name its run.toml")):
        answer = command("prune", made.run.root, *arguments)
        assert (answer.code, said in answer.err) == (2, True)
    answer = command("prune", made.toml, "--tier", "nowhere")
    assert (answer.code, "it has: store" in answer.err) == (2, True)


def test_a_place_is_left_alone_by_a_run_directory_that_is_lost(made: Any, command: Command, s3_keys: Any) -> None:
    """Case M9: what is not here is no reason to delete it there."""
    bucket = s3_keys.make_bucket()

    def there() -> dict[str, str]:
        return {item["Key"]: item["ETag"] for item in s3_keys.client().list_objects_v2(Bucket=bucket)["Contents"]}

    def another_run() -> None:
        create_run_info(made.run, load_config(made.toml))
        made.launch(1)
        made.write(20)

    with proxy_to(s3_keys.endpoint) as proxy:
        settings = {"url": f"s3://{bucket}/run", "endpoint_url": proxy.endpoint, "region": "us-east-1"}
        toml = [made.toml, *(part for key, value in settings.items() for part in ("--set", f"store.{key}='{value}'"))]
        assert command("push", *toml).code == 0
        before = there()
        assert len([key for key in before if key.endswith("manifest.json")]) == 2
        proxy.log.clear()
        shutil.rmtree(made.run.root)
        prune = ["prune", *toml, "--tier", "store", "--set", "store.retention.keep_last=1"]
        for code, words in ((4, prune), (4, ["push", *toml])):
            assert command(*words).code == code, "missing"
        files.make_dirs(made.run.root)
        assert command(*prune).code == 4, "empty"
        another_run()
        for words in (prune, ["push", *toml]):
            assert command(*words).code == 6, "another run's"
        assert "delete" not in proxy.operations()
    assert there() == before
