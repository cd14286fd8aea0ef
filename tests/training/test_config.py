"""run.toml: what is wrong is refused before anything starts, by path, value and fix; what is right means one thing only."""

import json
from pathlib import Path

import pytest

from perdure.training.config import changed_settings, load_config
from perdure.training.errors import ConfigError

GOOD = '[run]\nname = "x"\nentry = "train.py:train"\nsteps = 40\nchunk = 10\n'


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("def train(session): ...\n")
    (tmp_path / "run.toml").write_text(GOOD)
    return tmp_path / "run.toml"


def refusal(path: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.exit_code == 2
    return caught.value


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


FILES = {
    "missing": (lambda path: path.unlink(), "does not exist"),
    "folder": (folder, "is a folder, not a run.toml"),
    "empty": (lambda path: path.write_bytes(b""), "run is missing"),
    "binary": (lambda path: path.write_bytes(b"\xff\xfe\x00\x01"), "is not UTF-8 text"),
    "latin-1": (lambda path: path.write_bytes(b'[run]\nname = "caf\xe9"'), "is not UTF-8 text"),
    "python": (lambda path: path.write_text("import os\n"), "is not valid TOML"),
    "cut off": (lambda path: path.write_text(GOOD[:20]), "is not valid TOML"),
    "deep": (lambda path: path.write_text("x = " + "[" * 20_000), "is not valid TOML"),
    "twice": (lambda path: path.write_text(GOOD + "chunk = 3\n"), "is not valid TOML"),
    "unknown section": (lambda path: path.write_text(GOOD + "[checkpoints]\n"), "checkpoints is no setting"),
    "section as value": (lambda path: path.write_text("run = 5\n"), "run = 5: expected a table, got int"),
    "no steps": (lambda path: path.write_text(GOOD.replace("steps = 40\n", "")), "run.steps is missing"),
}


@pytest.mark.parametrize("kind", FILES)
def test_file_of_the_wrong_kind_is_refused_by_path(kind: str, toml: Path) -> None:
    damage, says = FILES[kind]
    damage(toml)
    error = refusal(toml)
    assert says in str(error)
    assert str(toml) in str(error)
    assert error.hint


WRONG = {
    # types
    "run.steps='forty'": "run.steps = 'forty': expected int, got str",
    "run.steps=1.5": "run.steps = 1.5: expected int, got float",
    "run.steps=true": "run.steps = True: expected int, got bool",
    "run.steps=[1]": "run.steps = [1]: expected int",
    "run.exact=maybe": "run.exact = 'maybe' is no choice",
    "store.checksums=md5": "store.checksums = 'md5' is no choice",
    "launch.env=1": "launch.env = 1: expected a table",
    "launch.stop_grace=soon": "launch.stop_grace = 'soon': expected float",
    "params=1": "is not section.key=value",
    # unknown
    "run.stepz=4": "run.stepz is no setting",
    "s3.url=x": "s3 is no setting",
    # run
    "run.name=''": "run.name = '' is not a plain name",
    "run.name=../x": "is not a plain name",
    "run.name=a b": "is not a plain name",
    f"run.name={'x' * 101}": "is not a plain name",
    "run.entry=train.py": "is not file.py:function",
    "run.entry=train.py:": "is not file.py:function",
    "run.entry=:train": "is not file.py:function",
    "run.entry=train.py:a.b": "is not file.py:function",
    "run.entry=/etc/passwd:train": "is not file.py:function",
    "run.entry=other.py:train": "which does not exist",
    f"run.entry={'x' * 300}.py:train": "File name too long",
    'run.entry="a\\u0000.py:train"': "run.entry = 'a\\x00.py:train' holds a control character",
    "run.steps=0": "run.steps = 0 is less than 1",
    "run.steps=1000000000000": "is too large",
    "run.chunk=0": "run.chunk = 0 is less than 1",
    "run.dir=train.py": "is a file",
    f"run.dir={'x' * 300}": "File name too long",
    'run.dir="a\\u0000b"': "holds a control character",
    # checkpoint
    "checkpoint.every=11": "checkpoint.every = 11 is larger than run.chunk = 10",
    "checkpoint.every=-1": "is negative",
    "checkpoint.snapshot_every=-1": "is not between 0 and the 10 steps",
    "checkpoint.snapshot_every=11": "is not between 0 and the 10 steps",
    "checkpoint.full_every=7": "is not a multiple of the 10 steps",
    "checkpoint.encoding=zip": "is no choice",
    "retention.keep_last=-1": "would keep none",
    "retention.keep_last=0": "would keep none",
    "retention.keep_best=0": "would keep none",
    "retention.keep_last=many": "is no choice",
    "checkpoint.threads=0": "out of range",
    # store
    "store.url=ftp://a/b": "has an unknown scheme",
    "store.url=file://host/x": "is not file:///absolute/folder",
    "store.url=s3:///x": "is not s3://bucket/prefix",
    "store.url=s3://bucket/a/../b": "is not s3://bucket/prefix",
    "store.url=s3://bucket/a?b=c": "is not s3://bucket/prefix",
    "store.url=s3://buc ket/a": "is not s3://bucket/prefix",
    "store.url='s3://bucket/a '": "begins or ends with a space",
    "store.url=file:///copies#2": "is cut off at # or ?",
    "tiers.share.url=' copies'": "begins or ends with a space",
    # tiers
    "tiers.share.ulr=x": "tiers.share.ulr is no setting",
    "tiers.share.every=1": "tiers.share.url is missing",
    "tiers.share=copies": "tiers.share = 'copies': expected a table",
    "tiers.store.url=copies": "tiers.store cannot be a tier's name",
    "tiers.Share.url=copies": "tiers.Share cannot be a tier's name",
    "tiers.share.url=runs/x/copies": "lie in one another",
    "tiers.share.retention.keep_lsat=1": "tiers.share.retention.keep_lsat is no setting",
    "store.retention.keep_last=-1": "store.retention.keep_last = -1 would keep none",
    "store.url=runs/x": "lie in one another",
    "store.url=runs/x/copies": "lie in one another",
    "store.url=.": "lie in one another",
    "store.storage_class=GLACIER": "store.storage_class = 'GLACIER' has to be thawed for hours",
    "store.storage_class=cold": "store.storage_class = 'cold' is no storage class",
    "store.part_mib=4": "store.part_mib = 4 is out of range",
    "store.endpoint_url=localhost:9000": "store.endpoint_url = 'localhost:9000' is not a URL",
    # launch
    "launch.processes=0": "launch.processes = 0 is out of range",
    "launch.nodes=0": "launch.nodes = 0 is out of range",
    "launch.address=tcp://n0:29500": "launch.address = 'tcp://n0:29500' is neither a name nor an IPv4 address",
    "launch.node_timeout=0": "launch.node_timeout = 0.0 is out of range",
    "launch.shared_disk=false": "launch.shared_disk = false needs a store.url",
    "launch.processes=129": "launch.processes = 129 is out of range",
    "launch.launcher=mpi": "launch.launcher",
    "launch.launcher=command": "launch.command starts no rank: {module} is not in it",
    "launch.command=['mpirun', '{module}']": 'launch.command is set, and launch.launcher = "auto" does not use it',
    "launch.stop_grace=0": "launch.stop_grace = 0.0 is out of range",
    "launch.stop_grace=inf": "launch.stop_grace = inf is out of range",
    "launch.stop_grace=nan": "launch.stop_grace = nan is out of range",
    "launch.startup_timeout=0.5": "launch.startup_timeout = 0.5 is out of range",
    "launch.step_timeout=-1": "launch.step_timeout = -1.0 is out of range",
    "launch.env.A-B=1": "launch.env: 'A-B' is no environment variable",
    'launch.env.A="\\u0000"': "is no environment variable",
    "launch.env={A=8}": "launch.env.A = 8: expected str, got int",
    "launch.env.HF_TOKEN=hidden-value": "launch.env.HF_TOKEN: a secret on the command line would be kept in Prefect",
    "launch.env={db_password='hidden-value'}": "launch.env.db_password: a secret",
    "launch={env={A='hidden-value'}}": "--set 'launch=...' is not section.key=value",
    "launch.env='A=hidden-value'": "launch.env = ...: expected a table, got str",
    "launch.env.PERDURE_AGENT_PID=1": "PERDURE_AGENT_PID is set by Perdure itself",
    # secrets among params
    "params.X_TOKEN=hidden-value": "params.X_TOKEN: a secret on the command line would be kept in Prefect and in every",
    "params.db={password='hidden-value'}": "params.db.password: a secret",
    "params.all=[{api_key='hidden-value'}]": "params.all.api_key: a secret",
    "params.note=xoxb-hidden-value": "params.note: a secret",
    "params={X_TOKEN='hidden-value'}": "--set 'params=...' is not section.key=value",
    # notify
    "notify.slack_api=ftp://x": "notify.slack_api = 'ftp://x' is not a URL",
    "notify.slack_api=http://user:hidden-value@x/": "notify.slack_api holds a user name or password",
    # params
    "params.x=nan": "params.x = nan is not a finite number",
    "params.x=[1, {y = inf}]": "params.x[1].y = inf is not a finite number",
    "params.day=2026-12-02": "params.day = 2026-12-02 is a date or time",
    "params.x=9223372036854775808": "does not fit into 64 bits",
    # --set itself
    "run.steps": "--set 'run.steps' is not section.key=value",
    "steps=4": "is not section.key=value",
    "run..steps=4": "is not section.key=value",
    "run.steps.x=4": "steps is not a section",
}


@pytest.mark.parametrize("assignment", WRONG)
def test_wrong_setting_is_refused_by_value(assignment: str, toml: Path) -> None:
    error = refusal(toml, assignment)
    assert WRONG[assignment] in str(error)
    assert str(toml) in str(error) or "--set" in str(error)
    assert "hidden-value" not in str(error)


@pytest.mark.parametrize(
    ("assignment", "fix"),
    [("run.stepz=4", "run.steps"), ("store.urll=x", "store.url"), ("run.exact=maybe", "prefer or require")],
)
def test_refusal_says_what_was_meant(assignment: str, fix: str, toml: Path) -> None:
    assert fix in refusal(toml, assignment).hint


def test_one_node_shares_its_disk_with_nobody(toml: Path) -> None:
    error = refusal(toml, "launch.shared_disk=false", "store.url=copies")
    assert "launch.shared_disk = false and launch.nodes = 1 exclude each other" in str(error)
    assert not load_config(toml, ["launch.shared_disk=false", "store.url=copies", "launch.nodes=2"]).launch.shared_disk


def test_params_that_only_sound_like_a_secret_are_none(toml: Path) -> None:
    config = load_config(toml, ["params.pad_token=<pad>", "params.sort_key=123456789"])
    assert config.params == {"pad_token": "<pad>", "sort_key": 123456789}


def test_circle_of_links_is_refused(toml: Path) -> None:
    (toml.parent / "loop.py").symlink_to("loop.py")
    assert "loop.py" in str(refusal(toml, "run.entry=loop.py:train"))


@pytest.mark.parametrize(
    ("assignment", "section", "key", "value"),
    [
        ("run.steps=80", "run", "steps", 80),
        ("run.steps = 80", "run", "steps", 80),
        ("run.name=5", "run", "name", "5"),
        ("run.name=true", "run", "name", "true"),
        ("run.name='y'", "run", "name", "y"),
        ("launch.env.OMP_NUM_THREADS=2", "launch", "env", {"OMP_NUM_THREADS": "2"}),
        ("launch.stop_grace=3", "launch", "stop_grace", 3.0),
        ("store.url=s3://b/p=q", "store", "url", "s3://b/p=q"),
        ("notify.slack_channel=#training", "notify", "slack_channel", "#training"),
    ],
)
def test_set_reads_values_as_toml_and_bare_words_as_text(
    assignment: str, section: str, key: str, value: object, toml: Path
) -> None:
    found = getattr(getattr(load_config(toml, [assignment]), section), key)
    assert found == value
    assert type(found) is type(value)


def test_set_reaches_params_of_any_depth_and_the_last_one_counts(toml: Path) -> None:
    toml.write_text(GOOD + "[params]\nlr = 0.1\n")
    config = load_config(toml, ["params.lr=0.2", "params.model.width=8", "params.lr=0.3", "params.words=[1, 'a']"])
    assert config.params == {"lr": 0.3, "model": {"width": 8}, "words": [1, "a"]}


def test_paths_are_relative_to_the_file_wherever_one_stands(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = toml.parent.resolve()
    monkeypatch.chdir("/")
    config = load_config(toml, ["store.url=copies/a b"])
    assert (config.run_dir, config.entry_file) == (home / "runs/x", home / "train.py")
    assert config.store_url == (home / "copies/a b").as_uri()
    monkeypatch.chdir(home)
    assert load_config("run.toml", ["run.dir=../elsewhere"]).run_dir == home.parent / "elsewhere"


def test_tiers_are_set_at_three_levels_each_with_a_retention_of_its_own(toml: Path) -> None:
    config = load_config(
        toml,
        [
            *("store.url=s3://b/x", "store.retention.keep_last=5", "tiers.share.url=far", "tiers.share.every=100"),
            *("tiers.cold.url=s3://b/cold", "tiers.cold.milestones=true", "tiers.cold.retention.keep_within=4w"),
        ],
    )
    assert config.tier_urls == {"share": (toml.parent.resolve() / "far").as_uri(), "cold": "s3://b/cold"}
    share, cold = config.tiers["share"], config.tiers["cold"]
    assert (share.every, share.takes_all, cold.milestones) == (100, False, True)
    kept = (config.store.retention.keep_last, share.retention.keep_last, cold.retention.keep_within)
    assert kept == (5, None, "4w")
    assert config.retention.keeps_all


def test_launch_command_is_words_with_known_slots(toml: Path) -> None:
    command = ["bash", "-c", "OUT=${out} {python} -m {module}", "{processes}"]
    launch = load_config(toml, ["launch.launcher=command", f"launch.command={json.dumps(command)}"]).launch
    assert launch.command == tuple(command), "what a shell replaces is the shell's"
    for words, problem in ((["", "{module}"], "cannot be started"), (["a", "{module}", "-n{gpus}"], "{gpus} means nothing")):
        assert problem in str(refusal(toml, "launch.launcher=command", f"launch.command={json.dumps(words)}"))


def test_unknown_setting_of_a_tier_is_told_the_nearest_one_and_the_tier(toml: Path) -> None:
    error = refusal(toml, "tiers.a.url=x", "tiers.b.url=y", "tiers.b.retention.keep_lst=3")
    assert "tiers.b.retention.keep_lst is no setting" in str(error)
    assert error.hint == "did you mean tiers.b.retention.keep_last?"
    assert refusal(toml, "retention.keep_last=many").hint == "use a number or all"


def test_places_may_not_lie_in_one_another_unless_they_are_other_servers(toml: Path) -> None:
    for one, other in (("copies", "copies/far"), ("s3://b/x", "s3://b/x/"), ("s3://b/x", "s3://b")):
        assert "lie in one another" in str(refusal(toml, f"store.url={one}", f"tiers.far.url={other}"))
    same = ["store.url=s3://b/x", "tiers.far.url=s3://b/x", "tiers.far.endpoint_url=http://h:9000"]
    assert load_config(toml, same).tier_urls == {"far": "s3://b/x"}


def test_linked_run_toml_means_the_folder_it_lies_in(toml: Path, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links/mine.toml").symlink_to(toml)
    assert load_config(tmp_path / "links/mine.toml").entry_file == toml.parent.resolve() / "train.py"


@pytest.mark.parametrize("url", ["s3://bucket/prefix/", "file:///mnt/a%20b", ""])
def test_store_url_has_one_spelling(url: str, toml: Path) -> None:
    assert load_config(toml, [f"store.url='{url}'"]).store_url == url.rstrip("/")


def test_byte_order_mark_is_no_mistake(toml: Path) -> None:
    toml.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_config(toml).run.name == "x"


def test_chunks_end_on_multiples_and_on_the_last_step_and_saves_with_them_unless_told(toml: Path) -> None:
    config = load_config(toml, ["run.steps=23", "checkpoint.every=4"])
    assert config.save_every == 4
    assert [config.chunk_end(step) for step in (0, 9, 10, 20, 22)] == [10, 10, 20, 23, 23]
    assert load_config(toml).save_every == 10


TRAJECTORY = {
    "run.steps=50": "steps: 40 -> 50",
    "run.entry=other.py:train": "entry: train.py:train -> other.py:train",
    "params.lr=0.2": "params.lr: 0.1 -> 0.2",
    "params.new=1": "params.new: (absent) -> 1",
    "params.model.width=9": "params.model.width: 8 -> 9",
    "params.width=8": "params.width: 8.0 -> 8",
}


@pytest.mark.parametrize("assignment", TRAJECTORY)
def test_setting_that_decides_the_weights_is_a_difference(assignment: str, toml: Path) -> None:
    (toml.parent / "other.py").write_text("")
    toml.write_text(GOOD + "[params]\nlr = 0.1\nwidth = 8.0\nmodel = { width = 8 }\n")
    old, new = load_config(toml).trajectory(), load_config(toml, [assignment]).trajectory()
    assert changed_settings(old, new) == [TRAJECTORY[assignment]]
    assert changed_settings(old, old) == []


@pytest.mark.parametrize(
    "assignment",
    ["run.chunk=20", "run.dir=elsewhere", "checkpoint.every=5", "store.url=copies", "launch.env.A=1", "notify.slack_channel=x"],
)
def test_setting_that_does_not_decide_the_weights_is_none(assignment: str, toml: Path) -> None:
    assert changed_settings(load_config(toml).trajectory(), load_config(toml, [assignment]).trajectory()) == []


def test_message_is_one_line(toml: Path) -> None:
    for assignment in WRONG:
        assert "\n" not in str(refusal(toml, assignment))
