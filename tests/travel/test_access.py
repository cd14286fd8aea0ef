"""Who may do what at a bucket, and how it is reached: the documented rights of each job, keys that expire, a certificate of our
own, the bucket in the host name. One S3 server with an identity for each."""

import contextlib
import json
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from conftest import BUCKET, WEED, Keys, S3Server, free_port, running_weed
from harness import wait_until
from storage.glacier import Glacier
from storage.proxy import proxy_to
from tls_proxy import make_certificate

from perdure.training import files
from perdure.training.checkpoint import facts
from perdure.training.errors import StoreError
from perdure.training.retention_settings import RetentionSection
from perdure.training.run_dir import RunDir
from perdure.training.storage.s3 import S3Store
from perdure.training.store_settings import StoreSettings
from perdure.training.tier_settings import StoreSection, TierSection
from perdure.training.travel import archive, prune, scrub_plan, sweep, thaw
from perdure.training.travel.copies import Stored
from perdure.training.travel.places import Remote, Tier
from perdure.training.travel.pull import pull
from perdure.training.travel.push import push
from perdure.training.travel.scrub import scrub

PAGE = Path(__file__).parents[2] / "docs" / "stores.md"
PREFIX = "team/run"
PUSH = "train, push, archive, scrub"
DOMAIN = "s3.test"
MadeRun = Any


def documented() -> dict[str, tuple[list[str], list[str]]]:
    """Job -> rights on its objects and on the bucket, from the table of the page."""
    table = PAGE.read_text().partition("### The least rights")[2].partition("\n\n- ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if "`s3:" in line]
    rights = {row[0].strip(): (re.findall(r"`(s3:\w+)`", row[1]), re.findall(r"`(s3:\w+)`", row[2])) for row in rows}
    assert set(rights) == {PUSH, "prune", "pull, restore", "thaw"}
    return rights


def policy(objects: list[str], bucket: list[str]) -> dict[str, Any]:
    statements = [
        {"Effect": "Allow", "Action": objects, "Resource": f"arn:aws:s3:::{BUCKET}/{PREFIX}/*"},
        {"Effect": "Allow", "Action": bucket, "Resource": f"arn:aws:s3:::{BUCKET}"},
    ]
    return {"Version": "2012-10-17", "Statement": [one for one in statements if one["Action"]]}


@dataclass
class Access:
    server: S3Server
    keys: dict[str, Keys]
    https_port: int
    authority: Path

    def give(self, keys: Keys) -> None:
        """The running server knows them from now on."""
        self._configure(keys, f"-access_key {keys.access} -secret_key {keys.secret} -actions Read,Write,List")
        wait_until(lambda: self._is_known(keys), "the server knows the key")

    def take_away(self, keys: Keys) -> None:
        self._configure(keys, "-delete")
        wait_until(lambda: not self._is_known(keys), "the server has forgotten the key")

    def _configure(self, keys: Keys, what: str) -> None:
        """The server takes it in some time later."""
        done = subprocess.run(
            [WEED, "shell", f"-master={self.server.master}"],
            input=f"s3.configure -user lab-{keys.access} {what} -apply",
            text=True,
            capture_output=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr

    def _is_known(self, keys: Keys) -> bool:
        with contextlib.closing(self.server.client(keys)) as client:
            try:
                client.list_objects_v2(Bucket=BUCKET, MaxKeys=1)
            except ClientError as error:
                if error.response["Error"]["Code"] != "InvalidAccessKeyId":
                    raise
                return False
        return True


@pytest.fixture(scope="module")
def access(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Access]:
    folder = tmp_path_factory.mktemp("access")
    key, certificate = make_certificate(folder)
    jobs = documented()
    train, objects = jobs[PUSH], jobs[PUSH][0]
    jobs["no multipart listing"] = ([right for right in objects if "List" not in right], ["s3:ListBucket"])
    jobs["no listing"] = (objects, [])
    assert train[0]
    keys = {job: Keys.random() for job in ["admin", *jobs]}
    identities = {
        "identities": [
            {"name": "admin", "credentials": [credentials(keys["admin"])], "actions": ["Admin"]},
            *({"name": job, "credentials": [credentials(keys[job])], "policyNames": [job]} for job in jobs),
        ],
        "policies": [{"name": job, "content": json.dumps(policy(*rights))} for job, rights in jobs.items()],
    }
    port = free_port()
    https = (f"-s3.port.https={port}", f"-s3.cert.file={certificate}", f"-s3.key.file={key}", f"-s3.domainName={DOMAIN}")
    admin = keys["admin"]
    with running_weed(folder, identities, (admin, admin, admin), *https) as server:
        yield Access(server, keys, port, certificate)


def credentials(keys: Keys) -> dict[str, str]:
    return {"accessKey": keys.access, "secretKey": keys.secret}


@pytest.fixture
def opened(access: Access, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., S3Store]]:
    """Opens the run's store with the key of a job; empties it at the end."""
    stores: list[S3Store] = []

    def open_one(job: str, *, endpoint: str = "", prefix: str = PREFIX, **more: Any) -> S3Store:
        for name, value in access.keys[job].environment().items():
            monkeypatch.setenv(name, value)
        settings = StoreSettings(endpoint_url=endpoint or access.server.endpoint, region="us-east-1", part_mib=5, **more)
        stores.append(S3Store(BUCKET, prefix, settings))
        assert stores[-1].client  # made now, with these keys
        return stores[-1]

    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    yield open_one
    sweeper = open_one("admin", prefix="")
    sweeper.delete([item.key for item in sweeper.list("")])
    for store in stores:
        store.client.close()


# rights


def test_trainer_with_the_documented_rights_pushes_but_cannot_delete(
    opened: Callable[..., S3Store], made: MadeRun, elsewhere: RunDir
) -> None:
    store = opened(PUSH)
    name = made.commit(100, 1, pack=6 << 20)
    assert push(made.dir, store, name).result == "good"
    with pytest.raises(StoreError, match=r"were not deleted: .*AccessDenied") as caught:
        store.delete([item.key for item in store.list("")])
    assert "s3:DeleteObject" in caught.value.hint
    assert pull(opened("pull, restore"), elsewhere) == name
    later, pruner = made.commit(200, 1), opened("prune")
    push(made.dir, opened(PUSH), later)
    sweep.recover(made.dir, pruner, "store")
    found = prune.survey(made.dir, pruner, "store", RetentionSection(keep_last=1))
    assert [one.name for one in sweep.execute(made.dir, pruner, "store", found).removed] == [name]
    with pytest.raises(StoreError, match=r"s3://ckpt/team/other/x.*AccessDenied"):
        opened(PUSH, prefix="team/other").put("x", b"")


def test_archive_and_scrub_with_the_rights_of_a_push_and_a_thaw_with_its_own(
    access: Access, opened: Callable[..., S3Store], made: MadeRun, elsewhere: RunDir
) -> None:
    name, store = made.commit(100, 1, pack=6 << 20), opened(PUSH)
    push(made.dir, store, name)
    opened("admin").put(RunDir.checkpoint_key(name, "rank-00000.index"), b"rot")
    found = scrub_plan.survey(made.dir, [Stored(store)]).copies
    done = scrub(made.dir, [Stored(store)], found, scrub_plan.choose(found, 1 << 40))
    assert [one.outcome for one in done.found] == ["good", "repaired"]
    files.remove_tree(made.dir.checkpoint(name))
    with proxy_to(access.server.endpoint, Glacier(looks=0)) as proxy:
        cold = {"endpoint": proxy.endpoint, "prefix": f"{PREFIX}/cold", "storage_class": "DEEP_ARCHIVE"}
        tier = Tier(word="cold", store=opened(PUSH, **cold), section=TierSection(storage_class="DEEP_ARCHIVE"))
        remotes = [Remote(word="store", store=opened("pull, restore"), section=StoreSection()), tier]
        assert len(archive.execute(made.dir, remotes, archive.survey(made.dir, remotes)).copied) == 1
        asked = thaw.ask(made.dir, Stored(opened("thaw", **cold), "cold"), name)
        assert asked is not None
        assert asked.state == "thawed"
        assert pull(opened("pull, restore", **cold), elsewhere, place="cold") == name


def test_reader_with_the_documented_rights_pulls_but_cannot_push(
    opened: Callable[..., S3Store], made: MadeRun, elsewhere: RunDir
) -> None:
    name = made.commit(100, 1)
    push(made.dir, opened("admin"), name)
    reader = opened("pull, restore")
    assert pull(reader, elsewhere) == name
    later = made.commit(200, 1)
    with pytest.raises(StoreError, match="AccessDenied") as caught:
        push(made.dir, reader, later)
    assert (caught.value.exit_code, caught.value.retryable) == (6, False)
    assert "docs/stores.md" in caught.value.hint
    assert facts.trust(made.dir, later) == "verified"


def test_uploads_work_without_the_right_to_list_their_parts(opened: Callable[..., S3Store], made: MadeRun) -> None:
    store = opened("no multipart listing")
    assert push(made.dir, store, made.commit(100, 1, pack=11 << 20)).result == "good"


def test_key_that_may_not_list_is_told_so_and_finds_no_damage(
    opened: Callable[..., S3Store], made: MadeRun, elsewhere: RunDir
) -> None:
    name = made.commit(100, 1)
    push(made.dir, opened("admin"), name)
    with pytest.raises(StoreError, match="AccessDenied") as caught:
        pull(opened("no listing"), elsewhere)
    assert "docs/stores.md" in caught.value.hint
    assert not elsewhere.run_json.exists()


# keys that expire


PROCESS = """
import json, pathlib, time
folder = pathlib.Path(__file__).parent
with open(folder / "asked", "a") as file:
    file.write("x")
expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 300))
print(json.dumps({"Version": 1, "Expiration": expires, **json.loads((folder / "keys.json").read_text())}))
"""


def test_keys_that_expire_in_a_long_lived_process_are_fetched_again(
    access: Access, opened: Callable[..., S3Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server forgets the first key in the middle of an upload, as a token service does; what follows has the second. Keys
    of the last ten minutes are not used again without asking."""
    first, second = Keys.random(), Keys.random()
    (tmp_path / "process.py").write_text(PROCESS)
    (tmp_path / "config").write_text(f"[profile lab]\ncredential_process = {sys.executable} {tmp_path / 'process.py'}\n")

    def hand_out(keys: Keys) -> None:
        found = {"AccessKeyId": keys.access, "SecretAccessKey": keys.secret}
        (tmp_path / "keys.json").write_text(json.dumps(found))

    access.give(first)
    hand_out(first)
    store = opened("admin")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    data = secrets.token_bytes(11 << 20)
    (tmp_path / "data").write_bytes(data)

    def rotate(done: int) -> None:
        if not rotated:
            access.give(second)
            hand_out(second)
            access.take_away(first)  # now: a part that is refused asks again and gets the second
            rotated.append(done)

    rotated: list[int] = []
    with proxy_to(access.server.endpoint) as proxy:
        store = S3Store(BUCKET, PREFIX, StoreSettings(endpoint_url=proxy.endpoint, region="us-east-1", part_mib=5))
        store.put("before", b"1")
        store.put_file("data", tmp_path / "data", progress=rotate)
        assert store.get("data", limit=len(data)) == data
        signed = [seen.headers.get("authorization", "").partition("Credential=")[2][:20] for seen in proxy.log]
    assert first.access in signed[0]
    assert second.access in signed[-1]
    assert rotated
    assert len((tmp_path / "asked").read_text()) > 1
    store.client.close()


# how it is reached


def test_certificate_of_our_own_is_trusted_by_ca_bundle_and_else_refused_with_that_hint(
    access: Access, opened: Callable[..., S3Store], made: MadeRun, elsewhere: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = f"https://127.0.0.1:{access.https_port}"
    with pytest.raises(StoreError, match="SSLError") as caught:
        opened("admin", endpoint=endpoint).size("x")
    assert "AWS_CA_BUNDLE" in caught.value.hint
    assert not caught.value.retryable
    monkeypatch.setenv("AWS_CA_BUNDLE", str(access.authority.with_name("none")))
    assert opened("admin", endpoint=endpoint).send("x", b"1") is None
    monkeypatch.setenv("AWS_CA_BUNDLE", str(access.authority))
    store = opened("admin", endpoint=endpoint)
    name = made.commit(100, 1, pack=6 << 20)
    assert push(made.dir, store, name).result == "good"
    assert pull(store, elsewhere) == name
    assert store.send("quick", b"x"), "the quick lane trusts it, too"


def test_bucket_in_the_host_name(
    access: Access, opened: Callable[..., S3Store], made: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names are resolved here, as no DNS knows them; the server finds the bucket by the Host header alone."""
    resolve, asked = socket.getaddrinfo, set[str]()

    def resolved(host: Any, *args: Any, **more: Any) -> Any:
        asked.update({str(host)} if str(host).endswith(DOMAIN) else ())  # a thread of another test may ask as well
        return resolve("127.0.0.1" if str(host).endswith(DOMAIN) else host, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    endpoint = f"http://{DOMAIN}:{access.server.endpoint.rpartition(':')[2]}"
    store = opened("admin", endpoint=endpoint, addressing="virtual")
    assert push(made.dir, store, made.commit(100, 1, pack=6 << 20)).result == "good"
    assert asked == {f"{BUCKET}.{DOMAIN}"}
    asked.clear()
    assert opened("admin", endpoint=endpoint).size("run.json")
    assert asked == {DOMAIN}
