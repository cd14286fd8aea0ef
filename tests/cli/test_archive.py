"""`archive` shows what the tiers lack and why, then fills them; nothing to do is said, a tier that is away is exit code 6."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import BUCKET, S3Server
from storage.glacier import Glacier
from storage.proxy import proxy_to

from perdure.training.run_dir import rank_pack

Command = Callable[..., Any]


def test_the_plan_is_shown_then_done_and_ls_says_where_copies_are(made: Any, command: Command, tmp_path: Path) -> None:
    tiers = ["--set", "tiers.share.url=share", "--set", "tiers.share.every=40", "--set", "tiers.far.url=far"]
    unproven = command("archive", made.toml, *tiers, "--dry-run")
    assert "not verified yet, so not counted: 2 checkpoints" in unproven.out
    assert command("verify", made.run.root).code == 0
    shown = command("archive", made.toml, *tiers, "--dry-run")
    assert shown.code == 0
    assert "step is a multiple of 40" in shown.out
    assert shown.out.splitlines()[-1].startswith("would make 3 copies, ")
    assert not (tmp_path / "share").exists()
    answer = command("archive", made.toml, *tiers, "--json")
    assert answer.code == 0
    copies = [(row["step"], row["tier"], row["source"], row["result"]) for row in answer.json["copies"]]
    assert copies == [(20, "far", "local", "copied"), (40, "far", "local", "copied"), (40, "share", "local", "copied")]
    listed = command("ls", made.run.root, "--json").json["checkpoints"]
    assert [(row["trust"], row["places"]) for row in listed] == [
        ("archived", ["far", "local"]), ("archived", ["far", "local", "share"]),
    ]  # fmt: skip
    assert "far, local, share" in command("ls", made.run.root).out
    status = command("status", made.toml, *tiers, "--json").json
    assert (status["newest_archived_step"], status["places"]) == (40, {"store": None, "share": 40, "far": 40})
    again = command("archive", made.toml, *tiers)
    assert again.out == f"nothing to archive: the tiers of {made.run.root} have what they are to have\n"
    shutil.rmtree(made.run.root)
    out = tmp_path / "out.safetensors"
    restored = [command("restore", made.toml, out, "--force", *tiers, *of, "--json").json for of in ((), ("--step", "20"))]
    sources = [(one["step"], one["source"]) for one in restored]
    assert sources == [(40, (tmp_path / "share").as_uri()), (20, (tmp_path / "far").as_uri())]
    pack = tmp_path / "share/checkpoints" / listed[1]["name"] / rank_pack(0)
    whole = pack.read_bytes()
    pack.write_bytes(bytes(len(whole)))
    other = command("restore", made.toml, out, "--force", *tiers, "--json")
    assert (other.json["source"], "another copy is read" in other.err) == ((tmp_path / "far").as_uri(), True)
    pack.write_bytes(whole)
    listed = command("pull", made.toml, *tiers, "--dry-run")
    assert listed.out.splitlines()[0] == f"share ({(tmp_path / 'share').as_uri()}):"
    pulled = command("pull", made.toml, *tiers, "--json").json
    assert (pulled["step"], pulled["place"], pulled["run_dir"]) == (40, "share", str(made.run.root))
    assert command("ls", made.run.root, "--json").json["checkpoints"][0]["places"] == ["share"]


def test_a_tier_that_is_away_is_said_and_the_others_are_filled(made: Any, command: Command, tmp_path: Path) -> None:
    assert command("verify", made.run.root).code == 0
    (tmp_path / "far").write_text("no folder")
    tiers = ["--set", "tiers.far.url=far", "--set", "tiers.share.url=share"]
    answer = command("archive", made.toml, *tiers)
    assert answer.code == 6
    assert "made 2 copies" in answer.out
    assert "far was left: " in answer.out


def test_a_run_directory_and_a_run_without_tiers_are_told_apart(made: Any, command: Command) -> None:
    refused = command("archive", made.run.root)
    assert (refused.code, "name its run.toml" in refused.err) == (2, True)
    none = command("archive", made.toml)
    assert (none.code, none.out) == (0, f"nothing to archive: {made.toml} has no [tiers.NAME]\n")


def test_a_frozen_checkpoint_is_asked_for_shown_waited_for_and_read(
    made: Any, command: Command, s3_keys: S3Server, tmp_path: Path
) -> None:
    assert command("verify", made.run.root, "--step", "40").code == 0
    name, glacier = "000000000040-0001", Glacier(looks=1)
    with proxy_to(s3_keys.endpoint, glacier) as proxy:
        url = {
            "url": f"s3://{BUCKET}/{made.id}",
            "endpoint_url": proxy.endpoint,
            "storage_class": "DEEP_ARCHIVE",
            "region": "here",
        }
        tiers = ["--set", "store.url=", *(part for key, text in url.items() for part in ("--set", f"tiers.cold.{key}={text}"))]
        assert command("archive", made.toml, *tiers).code == 0
        assert "cold (frozen), local" in command("ls", made.run.root).out
        assert "--thaw 'newest' is not the name" in command("archive", made.toml, *tiers, "--thaw", "newest").err
        asked = command("archive", made.toml, *tiers, "--thaw", name)
        assert (asked.code, asked.out.partition(", asked")[0]) == (12, f"checkpoint {name} in cold is thawing")
        assert "cold (thawing, asked" in command("ls", made.run.root).out
        status = command("status", made.run.root, "--json").json
        assert [(one["name"], one["place"], one["state"]) for one in status["thaws"]] == [(name, "cold", "thawing")]
        glacier.freeze()
        shutil.rmtree(made.run.root)
        for left in (made.run.flow_runs, made.run.flow_log.parent):  # by `perdure run`, which ended with 12 as well
            left.mkdir(parents=True)
        out = tmp_path / "out.safetensors"
        for verb in (("pull", made.toml), ("restore", made.toml, out)):
            refused = command(*verb, *tiers)
            assert (refused.code, f"--thaw {name}" in refused.err) == (12, True)
        asked = command("restore", made.toml, out, *tiers, "--thaw")
        assert (asked.code, f"checkpoint {name} in cold is thawing" in asked.err) == (12, True)
        assert command("restore", made.toml, out, *tiers, "--thaw", "--wait", "--json").json["step"] == 40
        glacier.freeze()
        where = ("--endpoint-url", proxy.endpoint, "--region", "here", "--force")
        assert command("restore", url["url"], out, *where, "--thaw", "--wait", "--json").json["source"] == url["url"]
        glacier.freeze()
        pulled = command("pull", made.toml, *tiers, "--thaw", "--wait", "--json")
        assert (pulled.code, pulled.json["step"], pulled.json["place"]) == (0, 40, "cold")
        assert f"checkpoint {name} in cold is thawing" in pulled.err
    assert "cold (thawed until" in command("ls", made.run.root).out
